"""What torchrun wants to know from a rank that fails."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from lightning_dp.errors import RankFailedError
from lightning_dp.faults.record import brief_of

ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
_LATER_S = 60


def record(error: BaseException) -> None:
    """Let torchrun's summary show ``error`` with its traceback, without ``@record`` in user code.

    torchrun takes the failure with the earliest second for the root cause, and the first rank's of
    several in one second. A rank that failed because another one did says that it failed later, and
    shows the other one's traceback, or one line where the same summary holds that already. Does nothing
    where torchrun did not start this process.
    """
    path = os.environ.get(ERROR_FILE_VARIABLE)
    if not path:
        return
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    get_error_handler().record_exception(error)
    line = brief_of(error)
    if line or isinstance(error, RankFailedError):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            file = Path(path)
            report = json.loads(file.read_text())
            info = report["message"]["extraInfo"]
            info["timestamp"] = str(int(info["timestamp"]) + _LATER_S)
            info["py_callstack"] = line or str(error)
            file.write_text(json.dumps(report))
