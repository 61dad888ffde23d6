"""`catto doctor`, and the base install: measuring, calibrating and the doctor work where torch is absent."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
from command import run, write_lines

from catto import __version__
from catto.cli.doctor import diagnose_installation
from catto.training import forward, selftest

pytestmark = pytest.mark.slow

# Hides the training stack, metadata included, as a base install would; then runs the commands one after the other.
WITHOUT_TORCH = """
import json, sys
from importlib import metadata
from importlib.machinery import PathFinder

ABSENT = {"torch", "transformers", "trl", "peft", "accelerate", "datasets", "vllm", "fastapi", "uvicorn"}

class Hidden(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] in ABSENT else super().find_spec(name, path, target)

real = metadata.version
def version(name):
    if name in ABSENT:
        raise metadata.PackageNotFoundError(name)
    return real(name)

sys.meta_path[:] = [Hidden if finder is PathFinder else finder for finder in sys.meta_path]
metadata.version = version
from catto.cli import main
for command in json.loads(sys.argv[1]):
    try:
        main(command)
    except SystemExit as stop:
        if stop.code:
            raise
"""


def without_torch(*commands: list[str]) -> subprocess.CompletedProcess[str]:
    call = [sys.executable, "-c", WITHOUT_TORCH, json.dumps(commands)]
    return subprocess.run(call, capture_output=True, text=True, check=False)


def test_versions_are_those_installed() -> None:
    found = diagnose_installation()
    assert found["catto"] == __version__
    assert found["packages"]["base"]["numpy"]["version"] == metadata.version("numpy")
    assert found["packages"]["train"]["torch"]["version"] == metadata.version("torch")
    assert "torch" not in found["packages"]["base"]
    assert "base" not in found["missing"]


def test_cpu_is_always_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("catto.objectives.tiles.cpu_bf16_slowdown", lambda: 1.8)
    told = diagnose_installation()["devices"][0]
    assert re.fullmatch(r"cpu: \d+ cores, a matrix product in bf16 takes 1\.8 times as long as in fp32", told)


def test_json_is_the_whole_output(capsys: pytest.CaptureFixture[str]) -> None:
    done = run(capsys, "doctor", "--json")
    assert (done.code, done.err) == (0, "")
    assert set(done.json) >= {"catto", "python", "platform", "packages", "missing", "install", "devices", "variables"}


def test_secrets_are_told_by_presence_only(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    for options in ((), ("--json",)):
        done = run(capsys, "doctor", *options)
        assert "very-secret" not in done.out + done.err
    assert done.json["variables"]["OPENAI_API_KEY"] is True
    assert done.json["variables"]["HF_TOKEN"] is False


def test_doctor_without_torch_says_how_to_get_it() -> None:
    done = without_torch(["doctor"])
    assert (done.returncode, done.stderr) == (0, "")
    assert "train lacks accelerate, datasets, peft, torch, transformers, trl: pip install 'catto[train]'" in done.stdout
    assert "torch is installed" not in done.stdout


def test_a_version_out_of_range_is_not_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "4.0.0" if name == "transformers" else real(name))
    found = diagnose_installation()
    assert found["packages"]["train"]["transformers"]["ok"] is False
    assert "transformers" in found["missing"]["train"]


def test_a_copy_that_is_not_installed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def requires(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", requires)
    found = diagnose_installation()
    assert found["missing"] == {"base": ["catto"]}
    assert found["install"] == {"base": "pip install catto"}


def test_broken_base_is_exit_code_one(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "0.1" if name == "scipy" else real(name))
    done = run(capsys, "doctor", "--json")
    assert done.code == 1
    assert done.json["missing"]["base"] == ["scipy"]


def test_base_install_measures_and_calibrates(tmp_path: Path) -> None:
    rows = [{"id": i, "confidence": 0.5 + i / 100, "correct": i % 3 > 0} for i in range(40)]
    path = str(write_lines(tmp_path / "a.jsonl", rows))
    figure, fitted, out = (str(tmp_path / name) for name in ("f.svg", "c.json", "n.jsonl"))
    done = without_torch(
        ["measure", path, "--resamples", "20", "--figure", figure],
        ["calibrate", "fit", path, "--method", "isotonic", "--out", fitted],
        ["calibrate", "apply", fitted, path, "--out", out],
    )
    assert done.returncode == 0, done.stderr
    assert "N = 40 answers" in done.stdout
    assert Path(figure).exists()
    assert len(Path(out).read_text(encoding="utf-8").splitlines()) == 40


# ---- the self-test ---------------------------------------------------------------------------------------------------

CHECKS = ["head values", "head gradient", "labels values"]
CHECKS += [f"{step} {what}" for step in ("step", "shared prompts") for what in ("values", "gradient")]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "CPU_SIZE", selftest.ModelSize(2, 12, 6, 200, 64, 1))


def test_selftest_passes_on_this_machine_and_says_so_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    done = run(capsys, "doctor", "--selftest")
    assert done.code == 0
    verdict = done.out.splitlines()[-1]
    assert verdict.startswith("Self-test passed: 7 of 7 checks on cpu in fp32 with sdpa attention; step catto ")
    assert f"catto {__version__}, torch {torch.__version__}" in verdict


@pytest.mark.usefixtures("small")
def test_selftest_in_json_has_every_check_and_times(capsys: pytest.CaptureFixture[str]) -> None:
    result = run(capsys, "doctor", "--selftest", "--json").json["selftest"]
    assert result["ok"] is True
    assert [check["name"] for check in result["checks"]] == CHECKS
    assert all(check["error"] < 1e-5 for check in result["checks"])
    assert set(result["milliseconds"]) == {"trl", "catto", "shared"}


@pytest.mark.usefixtures("small")
def test_selftest_passes_in_bf16() -> None:
    result = selftest.run_selftest(bf16=True)
    assert (result["ok"], result["precision"]) == (True, "bf16")
    assert result["checks"][4]["error"] > 1e-4  # the step is really computed in bf16


@pytest.mark.usefixtures("small")
def test_selftest_fails_where_a_response_sees_the_other(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def causal(batch: object, dtype: torch.dtype) -> torch.Tensor:
        size = batch.input_ids.shape[1]  # type: ignore[attr-defined]
        return torch.full((size, size), torch.finfo(dtype).min).triu(1).expand(len(batch.input_ids), 1, -1, -1)  # type: ignore[attr-defined]

    monkeypatch.setattr(forward, "dense_mask", causal)
    done = run(capsys, "doctor", "--selftest", "--json")
    assert done.code == 1
    failed = [check["name"] for check in done.json["selftest"]["checks"] if not check["ok"]]
    assert failed == ["shared prompts values", "shared prompts gradient"]


@pytest.mark.usefixtures("small")
def test_selftest_names_what_a_device_cannot_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: object) -> None:
        raise RuntimeError("no kernel\nfor this device")

    monkeypatch.setattr(forward, "dense_mask", unsupported)
    done = run(capsys, "doctor", "--selftest")
    assert done.code == 1
    assert "RuntimeError: no kernel" in done.out
    assert done.out.splitlines()[-1].startswith("Self-test FAILED: 5 of 6 checks on cpu in fp32")
