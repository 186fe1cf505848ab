"""What torchrun wants to know from a rank that fails."""

from __future__ import annotations

import os


def record(error: BaseException) -> None:
    """Let torchrun's summary show ``error`` with its traceback, without ``@record`` in user code.

    Does nothing where torchrun did not start this process.
    """
    if not os.environ.get("TORCHELASTIC_ERROR_FILE"):
        return
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    get_error_handler().record_exception(error)
