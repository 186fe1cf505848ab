"""What a stack tells: the user's line, and the key that is being logged; nothing where there is none."""

import threading
import types

import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultMetric,
    _Sync,
)

from lightning_dp.internals.stacks import logged_name, user_line


def test_the_users_line_is_the_innermost_that_is_no_librarys():
    assert user_line().startswith("test_internals_stacks.py:")
    assert user_line().endswith(" in test_the_users_line_is_the_innermost_that_is_no_librarys")
    seen = []
    module = types.ModuleType("torch.helper")
    exec("def call(act): act()", module.__dict__)
    module.call(lambda: seen.append(user_line()))
    assert "<lambda>" in seen[0]


def test_another_thread_is_in_a_line_of_its_own():
    inside, done = threading.Event(), threading.Event()

    def waits_here():
        inside.set()
        done.wait(10)

    thread = threading.Thread(target=waits_here)
    thread.start()
    inside.wait(10)
    assert thread.ident is not None
    assert user_line(thread.ident).endswith(" in waits_here")
    done.set()
    thread.join()
    assert user_line(thread.ident) == ""


def test_the_logged_key_is_known_where_lightning_reduces_it():
    seen = []

    def reduce(value, **_):
        seen.append(logged_name())
        return value

    sync = _Sync(fn=reduce, _should=True, rank_zero_only=False)
    meta = _Metadata("validation_step", "accuracy", _sync=sync)
    metric = _ResultMetric(meta, is_tensor=True)
    metric.update(torch.tensor(1.0), 1)
    metric.compute()
    assert seen == ["accuracy"] * len(seen) != []
    assert logged_name() == ""


def test_an_object_without_a_name_is_passed_by():
    class Other:
        meta = None

        def compute(self):
            return logged_name()

    assert Other().compute() == ""
