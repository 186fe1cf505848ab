"""Tensors as bytes: any dtype, layout and device travels in a few flat chunks, and is compared in them.

No arithmetic is done on them, so that no list of dtypes decides what a backend can send.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_dp.engine.bucket import is_dense

CHUNK_BYTES = 64 * 2**20


def plain_parts(tensor: Tensor) -> list[Tensor] | None:
    """Return dense tensors that share ``tensor``'s memory and together hold its values.

    A subclass that can be taken apart (``__tensor_flatten__``) counts as what it is made of.

    Returns:
        ``None`` where nothing of the kind is known: sparse, quantised, nested, sharded and meta tensors,
        and subclasses that tell nobody where their values are.
    """
    kind = type(tensor)
    if kind is not Tensor and kind is not nn.Parameter:
        if isinstance(tensor, DTensor):
            return None
        if hasattr(kind, "__tensor_flatten__"):
            names, _ = cast(Any, tensor).__tensor_flatten__()
            inner = [plain_parts(getattr(tensor, name)) for name in names]
            return None if None in inner else [part for parts in inner for part in parts or ()]
        if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
            return None
        tensor = tensor.as_subclass(Tensor)
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        return None
    return None if tensor.is_meta else [_without_overlap(tensor.detach())]


def _without_overlap(tensor: Tensor) -> Tensor:
    """Of an expanded tensor, the elements that really exist: the rest share their memory."""
    if tensor.is_contiguous() or is_dense(tensor):
        return tensor
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def chunks(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the tensors' parts in lists of at most ``CHUNK_BYTES``; what has no plain parts is left out.

    Larger elements come first: each place in a packed chunk is then aligned.
    """
    parts = [part for tensor in tensors for part in plain_parts(tensor) or ()]
    chunk: list[Tensor] = []
    size = 0
    for part in sorted(parts, key=lambda part: -part.element_size()):
        step = CHUNK_BYTES // part.element_size()
        large = part.numel() > step and part.is_contiguous()
        for piece in torch.split(part.view(-1), step) if large else [part]:
            if chunk and size + piece.nbytes > CHUNK_BYTES:
                yield chunk
                chunk, size = [], 0
            chunk.append(piece)
            size += piece.nbytes
    if chunk:
        yield chunk


def pack(chunk: Sequence[Tensor], device: torch.device, multiple: int = 1) -> Tensor:
    """Copy a chunk's elements, in logical order, into one flat uint8 tensor on ``device``.

    Args:
        chunk: Of ``chunks``; each may be on any device.
        device: Where the group can send from.
        multiple: The length is filled up with zeros to a multiple of this.
    """
    pieces = [_resolved(part).reshape(-1).view(torch.uint8).to(device) for part in chunk]
    missing = -sum(len(piece) for piece in pieces) % multiple
    if missing:
        pieces.append(torch.zeros(missing, dtype=torch.uint8, device=device))
    return torch.cat(pieces)


def unpack(flat: Tensor, chunk: Sequence[Tensor]) -> None:
    """Copy what ``pack`` made back into the chunk's tensors, in place."""
    # Outside of inference mode, tensors that were made in it refuse to be written.
    with torch.inference_mode(any(part.is_inference() for part in chunk)):
        for part, piece in zip(chunk, torch.split(flat, [p.nbytes for p in chunk]), strict=True):
            if part.is_contiguous() and _resolved(part) is part:
                part.view(-1).view(torch.uint8).copy_(piece)
            else:
                part.copy_(piece.view(part.dtype).view(part.shape))


def _resolved(tensor: Tensor) -> Tensor:
    """Without the lazy conjugate and minus, which bytes do not show."""
    lazy = tensor.is_conj() or tensor.is_neg()
    return tensor.resolve_conj().resolve_neg() if lazy else tensor
