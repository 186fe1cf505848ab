"""``lean-ddp doctor``, ``smoke`` and ``conf``."""

import json
import sys
from importlib import metadata

import pytest
import yaml

from lightning_dp.app import conf_tools, doctor, smoke, smoke_run
from lightning_dp.app.cli import main
from lightning_dp.app.findings import Finding, report
from lightning_dp.internals import binding
from tests.support import programs

PLAIN: dict[str, str] = {}


def levels(findings):
    return {finding.level for finding in findings}


def failures(findings):
    return [finding for finding in findings if finding.level == "FAIL"]


class TestDoctor:
    def test_this_machine_is_fit(self, capsys):
        assert main(["doctor"]) == 0
        *lines, end = capsys.readouterr().out.splitlines()
        assert end.endswith("0 FAIL; exit code 0: nothing failed")
        assert all(line[:5].strip() in ("ok", "warn") for line in lines)
        assert any(f"torch {metadata.version('torch')}" in line for line in lines)

    def test_json_is_a_list_of_findings(self, capsys):
        main(["doctor", "--json"])
        told = json.loads(capsys.readouterr().out)
        assert {"level", "what", "fix"} == set(told[0])

    @pytest.mark.parametrize("package", ["lightning", "pytorch-lightning"])
    @pytest.mark.parametrize("version", ["2.6.2", "2.6.3"])
    def test_a_malicious_release_fails(self, package, version, monkeypatch):
        real = metadata.version
        monkeypatch.setattr(
            doctor.metadata, "version", lambda name: version if name == package else real(name)
        )
        bad = failures(doctor.check_versions())
        assert any("malicious" in finding.what and package in finding.what for finding in bad)
        assert any("!=2.6.2" in finding.fix for finding in bad)

    def test_both_packages_are_no_reason_to_warn(self):
        """``lightning`` requires ``pytorch-lightning``: everybody has both."""
        assert any("pytorch-lightning" in rule for rule in metadata.requires("lightning") or ())
        findings = list(doctor.check_versions())
        assert levels(findings) == {"ok"}
        told = [finding.what for finding in findings if "lightning" in finding.what]
        assert any(f"lightning {metadata.version('lightning')}" in what for what in told)
        assert any(metadata.version("pytorch-lightning") in what for what in told[1:])

    @pytest.mark.parametrize("there", [["pytorch_lightning"], ["lightning", "pytorch_lightning"]])
    @pytest.mark.parametrize("given", [None, "pytorch_lightning"])
    def test_the_package_is_told_with_the_reason(self, monkeypatch, there, given):
        monkeypatch.setattr(binding, "_bound", None)
        monkeypatch.setattr(binding, "installed", lambda: there)
        for name in binding.TRAINERS.values():
            monkeypatch.delitem(sys.modules, name, raising=False)
        environment = {binding.VARIABLE: given} if given else {}
        with monkeypatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            (told,) = doctor.check_binding(environment)
        package = "pytorch_lightning" if given or len(there) == 1 else "lightning.pytorch"
        why = f"{binding.VARIABLE}=" if given else "only one" if len(there) == 1 else "unless"
        assert (told.level, package in told.what, why in told.what) == ("ok", True, True)

    def test_no_package_fails(self, monkeypatch):
        monkeypatch.setattr(binding, "_bound", None)
        monkeypatch.setenv(binding.VARIABLE, "pytorch_lightning")
        monkeypatch.setattr(binding, "installed", list)
        (told,) = doctor.check_binding({})
        assert told.level == "FAIL"
        assert told.fix.startswith("pip install")

    def test_a_version_out_of_range_fails_with_the_command_that_fixes_it(self, monkeypatch):
        monkeypatch.setattr(doctor.metadata, "version", lambda name: "0.1")
        bad = failures(doctor.check_versions())
        assert any("pip install 'torch>=" in finding.fix for finding in bad)

    @pytest.mark.parametrize(
        ("environment", "says", "fix"),
        [
            (
                {"SLURM_NTASKS": "1", "SLURM_JOB_NAME": "train"},
                "SLURM reports 1 task",
                "--ntasks-per-node=2",
            ),
            ({"LOCAL_RANK": "0"}, "LOCAL_RANK=0", "unset LOCAL_RANK"),
            ({"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "4"}, "4 ranks", "nproc-per-node=2"),
        ],
    )
    def test_a_shell_in_which_ranks_cannot_start_fails(self, environment, says, fix):
        (bad,) = doctor.check_launch(environment, 2, 1)
        assert bad.level == "FAIL"
        assert says in bad.what
        assert fix in bad.fix

    @pytest.mark.parametrize(
        "environment",
        [
            PLAIN,
            {"SLURM_NTASKS": "1", "SLURM_JOB_NAME": "interactive"},
            {"SLURM_NTASKS": "2", "SLURM_JOB_NAME": "train"},
            {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "RANK": "1"},
        ],
    )
    def test_a_shell_in_which_they_can_is_ok(self, environment):
        assert levels(doctor.check_launch(environment, 2, 1)) == {"ok"}

    def test_a_taken_port_is_a_warning(self):
        import socket

        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            sock.listen()
            taken = str(sock.getsockname()[1])
            assert "warn" in levels(doctor.check_network({"MASTER_PORT": taken}))

    def test_a_check_that_breaks_is_a_finding_itself(self, monkeypatch):
        def check_devices():
            raise RuntimeError("broken")

        monkeypatch.setattr(doctor, "check_devices", check_devices)
        assert any("broken" in f.what for f in failures(doctor.examine({}, 2, 1)))


def test_exit_codes_and_usage(capsys):
    warned = [Finding("ok", "a"), Finding("warn", "b", "c")]
    assert report(warned) == 0
    assert capsys.readouterr().out == (
        "ok    a\nwarn  b  -> fix: c\n1 ok, 1 warn, 0 FAIL; exit code 0: nothing failed\n"
    )
    assert report(warned, strict=True) == 1
    assert "exit code 1: something failed or was warned about" in capsys.readouterr().out
    assert report([*warned, Finding("FAIL", "d")], as_json=True) == 1
    long = "[bold]" + "a/b" * 100  # neither markup nor broken: it can be copied
    report([Finding("ok", long)])
    assert long in capsys.readouterr().out
    for bad in (["doctor", "--what"], ["conf"], ["smoke", "-n", "0"]):
        with pytest.raises(SystemExit) as caught:
            main(bad)
        assert caught.value.code == 2


class TestConf:
    def test_list_and_show(self, capsys):
        assert main(["conf", "list"]) == 0
        assert "strategy/lean_ddp " in capsys.readouterr().out
        assert main(["conf", "show", "strategy/lean_ddp"]) == 0
        node = yaml.safe_load(capsys.readouterr().out)
        assert node["_target_"] == "lightning_dp.LeanDDPStrategy"
        assert main(["conf", "show", "strategy/lean_dpp"]) == 2
        assert "Did you mean strategy/lean_ddp?" in capsys.readouterr().err

    def test_show_names_what_is_near(self, capsys):
        for name, near in [
            ("strategy", "strategy/ddp or strategy/lean_ddp or strategy/lean_zero1"),
            ("cpu_sim", "trainer/cpu_sim"),
            ("strateg/lean", "strategy/lean_ddp"),
        ]:
            assert main(["conf", "show", name]) == 2
            assert f"Did you mean {near}?" in capsys.readouterr().err

    def test_list_says_whole_sentences(self, capsys, monkeypatch):
        monkeypatch.setenv("COLUMNS", "9999")  # nothing is wrapped
        main(["conf", "list"])
        for line in capsys.readouterr().out.splitlines():
            assert line.split()[1:], line
            assert line[-1] in ".?" or "lean-ddp" in line, line
        text = "# @package _global_\n# One file,\n# of v1.2 or so. And more.\nx: 1\n# no"
        assert conf_tools.first_sentence(text) == "One file, of v1.2 or so."
        assert conf_tools.first_sentence("x: 1\n# no") == ""

    def test_copy_into_a_file_is_refused(self, tmp_path, capsys):
        (tmp_path / "file").write_text("")
        assert main(["conf", "copy", str(tmp_path / "file")]) == 1
        assert "is a file" in capsys.readouterr().err

    def test_copy_keeps_what_a_user_changed(self, tmp_path, capsys):
        assert main(["conf", "copy", str(tmp_path)]) == 0
        mine = tmp_path / "trainer" / "cpu.yaml"
        mine.write_text("# mine\n")
        assert main(["conf", "copy", str(tmp_path)]) == 1
        assert mine.read_text() == "# mine\n"
        assert main(["conf", "copy", str(tmp_path), "--force"]) == 0
        assert mine.read_text() != "# mine\n"
        capsys.readouterr()
        assert main(["conf", "check", "--config-dir", str(tmp_path)]) == 0
        assert capsys.readouterr().out.startswith("ok    eval\nok    train\n2 ok,")

    def test_check_finds_a_misspelt_argument(self, tmp_path, capsys):
        (tmp_path / "train.yaml").write_text(
            "defaults: [/strategy@strategy: lean_ddp, _self_]\nstrategy: {bucket_cap_md: 3}\n"
        )
        assert main(["conf", "check", "--config-dir", str(tmp_path)]) == 1
        assert "bucket_cap_mb" in capsys.readouterr().out

    def test_our_own_files_pass(self):
        assert levels(conf_tools.check_files()) == {"ok"}

    def test_a_folder_that_is_none(self, tmp_path):
        assert failures(conf_tools.check_files(tmp_path / "nothing"))


@pytest.mark.multi_process
class TestSmoke:
    @pytest.fixture(autouse=True)
    def sooner(self, monkeypatch):
        monkeypatch.setenv("PYTHONPATH", str(programs.SOONER))

    def test_two_ranks(self, tmp_path):
        findings = smoke.smoke(tmp_path, 2, "gloo", 120)
        assert levels(findings) == {"ok"}, findings
        assert [f.what.split(":")[0] for f in findings] == [*smoke.STEPS, "end"]

    @pytest.mark.parametrize(
        ("fault", "where", "why"),
        [
            ("1:accumulation:wrong", "accumulation: rank 1 got", "AssertionError"),
            ("0:preemption:exit", "preemption: rank 0 has not done it", "exit code 9"),
        ],
    )
    def test_a_rank_that_misbehaves_is_found(self, fault, where, why, tmp_path, monkeypatch):
        monkeypatch.setenv(smoke_run.FAULT_VARIABLE, fault)
        findings = smoke.smoke(tmp_path, 2, "gloo", 120)
        assert where in failures(findings)[0].what
        assert why in findings[-1].what

    def test_on_gpus_it_runs_over_nccl(self, monkeypatch):
        asked = []
        monkeypatch.setattr(smoke, "smoke", lambda folder, *rest: asked.append(rest) or [])
        for options in ([], ["--accelerator", "gpu", "-n", "8"]):
            smoke.main(options)
        assert asked == [(2, "gloo", 120.0), (8, "nccl", 120.0)]

    def test_one_that_hangs_is_ended(self, tmp_path, monkeypatch):
        monkeypatch.setenv(smoke_run.FAULT_VARIABLE, "1:all-reduce:hang")
        findings = smoke.smoke(tmp_path, 2, "gloo", 15)
        assert "not over after 15 s" in findings[-1].what
