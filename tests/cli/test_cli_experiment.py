"""`catto recipe`, `plan`, `teach`, `train` and `run`: what they say, refuse and cost."""

from __future__ import annotations

import io
import itertools
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from command import run, write_lines
from experiment_world import ENVIRONMENT, write_recipe

from catto.cli.display import Bar, RunDisplay, format_duration, show_bars, show_progress
from catto.methods import METHODS
from catto.pipeline.attempts import Attempt
from catto.pipeline.plan import Graph
from catto.pipeline.stage import Stage, StageSettings, digest_inputs, list_needed
from catto.recipe.load import find_shipped_recipes, load_recipe

Capture = pytest.CaptureFixture[str]
COMMANDS = ["", "data", "teach", "train", "plan", "run", "stage", "recipe", "recipe list", "recipe show", "recipe copy"]
COMMANDS += ["report"]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_help_has_an_example(capsys: Capture, command: str) -> None:
    shown = run(capsys, *command.split(), "--help")
    assert shown.code == 0
    assert re.search(rf"Examples?.*catto {command}", shown.out, re.DOTALL)


@pytest.mark.parametrize("command", [*COMMANDS, "measure", "calibrate fit", "eval", "select", "doctor"])
def test_the_values_of_options_have_names(capsys: Capture, command: str) -> None:
    options = [line for line in run(capsys, *command.split(), "--help").out.splitlines() if re.match(r"│[ *]+--", line)]
    # What typer writes of its own: types of Python, also beside flags.
    assert not [line for line in options if re.search(r"<(bool|str|int|float|path|list\[\w+\])>", line)]


def test_an_option_is_named_by_what_it_takes(capsys: Capture) -> None:
    shown = run(capsys, "eval", "--help").out
    assert re.search(r"--max-tokens +N", shown)
    assert re.search(r"--split +<\w+\|\w+", shown)
    assert re.search(r"--set +KEY=VALUE", run(capsys, "plan", "--help").out)


@pytest.mark.parametrize("arguments", [("select", "x.jsonl", "--k", "nine"), ("data", "snli", "--split", "dev")])
def test_a_wrong_value_is_told_without_the_validators_own_words(capsys: Capture, arguments: tuple[str, ...]) -> None:
    assert "Value error" not in run(capsys, *arguments).err


def test_the_usage_of_select_names_every_argument(capsys: Capture) -> None:
    assert "[]" not in run(capsys, "select", "--help").out


def python(source: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", source]
    return subprocess.run(command, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, check=False)


def test_help_waits_for_no_heavy_library(tmp_path: Path) -> None:
    heavy = ("torch", "transformers", "numpy", "scipy", "sklearn", "matplotlib", "datasets", "yaml", "openai")
    source = f"""
import sys
from catto.cli import main
try:
    main(["run", "--help"])
except SystemExit:
    print([name for name in {heavy} if name in sys.modules])
"""
    assert python(source, tmp_path).stdout.splitlines()[-1] == "[]"


def without_torch(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    source = f"import sys; sys.modules['torch'] = None; from catto.cli import main; main({list(arguments)})"
    return python(source, cwd)


def test_plan_and_teach_need_no_torch_and_run_says_that_it_does(tmp_path: Path) -> None:
    recipe = str(write_recipe(tmp_path))
    assert "train dpo+catto" in without_torch("plan", recipe, cwd=tmp_path).stdout
    assert "400 responses" in without_torch("teach", recipe, cwd=tmp_path).stdout
    told = without_torch("run", recipe, cwd=tmp_path)
    assert (told.returncode, told.stderr) == (2, "catto: training needs torch: pip install 'catto[train]'\n")


# ---- recipes ----------------------------------------------------------------------------------------------------


def test_recipes_are_listed_shown_and_copied(tmp_path: Path, capsys: Capture) -> None:
    listed = run(capsys, "recipe", "list").out.splitlines()
    assert [line.split()[0] for line in listed] == list(find_shipped_recipes())
    text = find_shipped_recipes()["quickstart"].read_text(encoding="utf-8")
    assert run(capsys, "recipe", "show", "quickstart").out == text
    copied = run(capsys, "recipe", "copy", "quickstart", tmp_path / "mine.yaml")
    assert copied.code == 0
    assert (tmp_path / "mine.yaml").read_text(encoding="utf-8") == text
    assert load_recipe(str(tmp_path / "mine.yaml")) == load_recipe("quickstart")


def test_a_command_to_go_on_with_can_be_pasted(tmp_path: Path, capsys: Capture) -> None:
    answers = write_lines(tmp_path / "my answers.jsonl", [{"confidence": 0.9, "correct": n % 2} for n in range(40)])
    tau = tmp_path / "my tau.json"
    pasted = [run(capsys, "recipe", "copy", "quickstart", tmp_path / "my own.yaml").out.strip()]
    pasted.append(run(capsys, "calibrate", "fit", answers, "--out", tau).out.splitlines()[-1])
    applied = run(capsys, "calibrate", "apply", tau, answers, "--out", tmp_path / "my rows.jsonl").out
    pasted.append(applied.splitlines()[-1])
    words = [shlex.split(line.partition(": ")[2]) for line in pasted]
    places = [tmp_path / name for name in ("my own.yaml", "my tau.json", "my rows.jsonl")]
    assert all(str(place) in line for place, line in zip(places, words, strict=True))


def test_a_copy_leaves_a_file_alone(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "quickstart.yaml").write_text("mine")
    told = run(capsys, "recipe", "copy", "quickstart", tmp_path)
    assert (told.code, told.err) == (2, f"catto: {tmp_path}/quickstart.yaml: already exists\n")
    assert (tmp_path / "quickstart.yaml").read_text() == "mine"


# ---- plan and teach ---------------------------------------------------------------------------------------------


def test_plan_says_when_choices_wait_for_every_seed(tmp_path: Path, capsys: Capture) -> None:
    rates = ("--set", "preference.learning_rates=[1e-4, 1e-5]")
    plan = ("plan", write_recipe(tmp_path), "--out", tmp_path / "out")
    told = "choices wait for every seed"
    assert told in run(capsys, *plan, *rates, "--set", "lr_choice=mean", "--seed", "0", "--seed", "1").out
    assert told not in run(capsys, *plan, *rates, "--set", "lr_choice=mean", "--seed", "0").out
    assert told not in run(capsys, *plan, "--set", "lr_choice=mean", "--seed", "0", "--seed", "1").out
    assert told not in run(capsys, *plan, *rates, "--seed", "0", "--seed", "1").out
    assert not (tmp_path / "out").exists()


def test_seeds_on_the_command_line_win(tmp_path: Path, capsys: Capture) -> None:
    stages = run(capsys, "plan", write_recipe(tmp_path), "--seed", "3", "--seed", "4", "--json").json
    assert {found[0] for stage in stages if (found := re.findall(r"seed (\d)", stage["name"]))} == {"3", "4"}


def test_a_dry_run_counts_and_writes_nothing(tmp_path: Path, capsys: Capture) -> None:
    arguments = ("teach", write_recipe(tmp_path), "--out", tmp_path / "out")
    told = run(capsys, *arguments, "--dry-run").out
    assert "witnesses: 400 requests for 40 questions; 0 responses are stored" in told
    assert "witnesses: free: the built-in teacher writes its responses here, without a model\n" in told
    assert "witnesses, held-out pairs of seed 0: 80 requests for 8 questions" in told
    assert "tokens" not in told
    paid = {"source": "server", "model": "m", "base_url": "http://localhost:9/v1"}
    sets = [f"teacher.{name}={value}" for name, value in paid.items()]
    told = run(capsys, *arguments, "--dry-run", *(part for each in sets for part in ("--set", each))).out
    assert "at most 409,600 generated tokens" in told
    assert run(capsys, *arguments, "--dry-run", "--set", "evaluation.engine=vllm").code == 0  # which evaluates alone
    assert "free" not in told
    assert "held-out" not in told  # a server may be paid, so it is asked for more only where the recipe says so
    asking = (*(part for each in sets for part in ("--set", each)), "--set", "evaluation.preference_pairs=true")
    assert "held-out pairs of seed 0: 80 requests for 8 questions" in run(capsys, *arguments, "--dry-run", *asking).out
    assert not (tmp_path / "out").exists()
    assert run(capsys, *arguments).code == 0
    assert (
        "witnesses: 0 requests for 40 questions; 400 responses are stored" in run(capsys, *arguments, "--dry-run").out
    )
    more = run(capsys, *arguments, "--dry-run", "--set", "teacher.n=3").out
    assert "witnesses: 120 requests for 40 questions; 0 responses are stored" in more


def test_plan_says_what_trainings_and_teacher_need(tmp_path: Path, capsys: Capture) -> None:
    """SFT: 5,000 rows x 3 epochs. DPO at two rates: 500 pairs x 2 responses x 2 epochs each. Rows of 2,048 tokens.

    That is 38.9 million tokens; 4.02e9 parameters at 0.4 x 312e12 / 24.1e9 = 5,171 tokens/s take 2.1 hours, 4 copies
    of two bytes are 32 GB. Teacher: 10 answers to 1,000 training questions and one to 50 validation questions. With
    100 training questions there are 1,000 rows and 100 pairs at most, 7.8 million tokens.
    """
    tasks = "tasks={snli: {train: 1000, validation: 50}}"
    sets = [tasks, "methods=[sft, dpo]", "budgets=[matched]", "seeds=[0]", "model.dtype=bfloat16"]
    plan = ["plan", "paper", "--out", tmp_path / "out", *(part for one in sets for part in ("--set", one))]
    lines = run(capsys, *plan).out.splitlines()[-4:]
    assert lines == [
        "3 training runs: up to 39 million tokens, with rows as long as the context",
        "4.02 billion parameters: 32 GB of GPU memory for weights, gradients and Adam's moments, then activations",
        "up to 2 GPU hours at 5,171 tokens/s (40% of an A100's 312 TFLOP/s)",
        "teacher: 10,050 requests, up to 10 million generated tokens",
    ]
    asking = run(capsys, *plan, "--set", "evaluation.preference_pairs=true").out  # 10 answers to 50 more questions
    assert "teacher: 10,550 requests, up to 11 million generated tokens" in asking
    few = run(capsys, *plan, "--set", "tasks={snli: {train: 100, validation: 50}}").out
    assert "3 training runs: up to 8 million tokens" in few
    assert "64 GB of GPU memory" in run(capsys, *plan, "--set", "model.dtype=null").out  # no dtype is fp32
    named = run(capsys, *plan, "--set", "model.path=some/model-7B").out  # by its name alone
    assert "7 billion parameters: 56 GB of GPU memory for weights, gradients and Adam's moments" in named
    small = run(capsys, *plan, "--set", "model.path=some/model-100M").out  # 38.9e6 x 6e8 operations
    assert "up to 0.05 GPU hours at 208,000 tokens/s" in small
    assert "or up to 59 hours of two CPU cores" in small
    tiny = run(
        capsys, "plan", "quickstart", "--out", tmp_path / "tiny"
    ).out  # nothing that takes time is said to take none
    assert "357,024 parameters: 0.01 GB of GPU memory" in tiny
    assert "or up to 0.02 hours of two CPU cores" in tiny
    adapter = run(capsys, *plan, "--set", "model.peft={r: 8}", "--set", "model.dtype=float32").out
    assert "16 GB of GPU memory for the weights, then activations" in adapter
    all_of_them = run(capsys, *plan, "--set", "tasks={snli: {validation: 50}}").out
    assert "not counted: train questions of snli" in all_of_them
    assert "training runs" not in run(capsys, *plan, "--json").out


def test_a_begun_stage_is_planned_as_begun(tmp_path: Path, capsys: Capture) -> None:
    recipe, out = write_recipe(tmp_path), tmp_path / "out"
    goal = Graph(load_recipe(str(recipe))).plan_questions("witnesses")
    with Attempt(out, goal, digest_inputs(out, goal)):
        pass
    stages = run(capsys, "plan", recipe, "--out", out, "--json").json
    assert [stage["name"] for stage in stages if stage["standing"] == "begun"] == ["questions witnesses"]


# ---- refusals ---------------------------------------------------------------------------------------------------

TWO = {"witnesses": None, "snli": None}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["run", "quickstrat"], "did you mean quickstart?"),
        (["run", "quickstart", "--set", "evaluation.bin=5"], "evaluation.bin: unknown key; did you mean bins?"),
        (["plan", "quickstart", "--set", "bins"], "--set bins: expected place=value"),
        (["plan", "quickstart", "--set", "tasks={snl: null}"], "tasks.snl: neither one of mmlu, snli,"),
        (["plan", "quickstart", "--set", "tasks={snl: null}"], "did you mean snli?"),
        (["teach", "quickstart", "--task", "snli"], "--task: snli is not one of witnesses"),
        (["train", "quickstart", "--method", "dpo+cato"], "did you mean dpo+catto?"),
        (["train", "quickstart", "--method", "dpo+ts"], "dpo+ts only rescales the confidence of dpo: train that"),
        (["train", "quickstart", "--method", "dpo", "--task", "snli"], "--task: snli is not one of witnesses"),
        (
            ["train", "quickstart", "--method", "dpo", "--set", f"tasks={TWO}".replace("None", "null")],
            "--task: the recipe has several, name one of witnesses, snli",
        ),
        (["run", "quickstart", "--set", "preference.trl.betta=1"], "unexpected keyword argument 'betta'"),
        (
            ["run", "quickstart", "--set", "preference.trl.loss_type=sigmiod"],
            "quickstart: preference (dpo): ValueError: Unknown loss type: sigmiod. Should be one of",
        ),
        (
            ["train", "quickstart", "--method", "dpo", "--set", "model.peft={r: 0}"],
            "quickstart: sft (sft): ValueError: `r` should be a positive integer value",
        ),
        (["plan", "quickstart", "--set", "sft.learning_rates=[.nan]"], "0: expected a finite number"),
        (["plan", "quickstart", "--seed", "-1"], "Invalid value for '--seed': Input should be"),
        (["plan", "quickstart", "--seed", "1", "--seed", "1"], "--seed: 1, 1 names a seed twice"),
        (["plan", "quickstart", "--set", "tasks={snli: null}", "--seed", "7"], "7 is not one of snli's split seeds 0,"),
        (["plan", "quickstart", "--set", "methods=[]"], "methods: expected at least 1 entry"),
        (["plan", "quickstart", "--set", "budgets=[]"], "budgets: expected at least 1 entry"),
        (["plan", "quickstart", "--out", __file__], "test_cli_experiment.py: not a folder"),
        (["run", "quickstart", "--out", f"{__file__}/below"], "test_cli_experiment.py: not a folder"),
        (["teach", "quickstart", "--out", __file__], "test_cli_experiment.py: not a folder"),
        (["eval", "m", "--task", "witnesses", "--out", __file__], "test_cli_experiment.py: not a folder"),
        (["train", "quickstart", "--method", "dpo+catto+ts"], "dpo+catto+ts only rescales the confidence of dpo+catto"),
        (["recipe", "show", "quickstar"], "did you mean quickstart?"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture, arguments: list[str], expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    told = run(capsys, *arguments)
    assert told.code == 2
    assert told.out == ""
    assert told.err.count("\n") == 1
    assert expected in told.err
    assert not list(tmp_path.iterdir())


def test_the_methods_are_named_where_one_is_asked_for(capsys: Capture) -> None:
    shown = " ".join(run(capsys, "train", "--help").out.replace("│", " ").split())
    assert all(name in shown for name in METHODS)


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("catto me", {"measure"}),
        ("catto run q", {"quickstart", "qwen-1.5b"}),
        ("catto recipe show s", {"smollm2"}),
        ("catto train quickstart --method dpo+c", {"dpo+catto"}),
        ("catto data com", {"commonsense_qa"}),
        ("catto eval m --task sn", {"snli"}),
        ("catto run mine.y", set()),  # nothing of ours: the shell goes on with files
    ],
)
def test_the_shell_completes_commands_recipes_methods_and_tasks(words: str, offered: set[str]) -> None:
    asked = {"_CATTO_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    program = Path(sys.executable).with_name("catto")
    told = subprocess.run([program], env={**os.environ, **asked}, capture_output=True, text=True, check=False)
    assert set(told.stdout.split()) == offered


# ---- the display ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"),
        (9.94, "9.9 s"),
        (10, "10 s"),
        (99.4, "99 s"),
        (100, "2 min"),
        (5999, "1 h 40 min"),
        (7500, "2 h 5 min"),
    ],
)
def test_lengths_of_time_are_short(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def stages(tmp_path: Path) -> tuple[Stage, ...]:
    return tuple(list_needed([Graph(load_recipe(str(write_recipe(tmp_path)))).plan_responses("witnesses")]))


def test_progress_is_told_at_most_every_ten_seconds(tmp_path: Path) -> None:
    """Events at 0, 1, ..., 25 s after the start: told at 10 and 20, which are 16 and 6 s before the end."""
    now, stream, (questions, teacher) = [100.0], io.StringIO(), stages(tmp_path)
    with show_bars(stream, clock=lambda: now[0]) as shown:
        lines = RunDisplay(shown, tmp_path, [teacher])
        lines.started(questions, 1, 2)
        for second in range(26):
            now[0] = 100.0 + second
            lines.progress(questions, second, 26, "loss 0.5")
        lines.ended(questions, "done", 26.0)
    assert stream.getvalue().splitlines() == [
        "[1/2] questions witnesses",
        "[1/2] questions witnesses: 10/26, loss 0.5, 16 s left",
        "[1/2] questions witnesses: 20/26, loss 0.5, 6.0 s left",
        "questions witnesses: done in 26 s",
    ]


def test_a_long_stage_is_told_of_more_and_more_rarely(tmp_path: Path) -> None:
    """An hour of events every second. Lines at 10, 20, ..., 200 s, then each a twentieth later than the last."""
    now, stream, (questions, teacher) = [0.0], io.StringIO(), stages(tmp_path)
    with show_bars(stream, clock=lambda: now[0]) as shown:
        lines = RunDisplay(shown, tmp_path, [teacher])
        lines.started(questions, 1, 2)
        for second in range(3601):
            now[0] = float(second)
            lines.progress(questions, second, 3600, "")
    told = [int(line.split(": ")[1].split("/")[0]) for line in stream.getvalue().splitlines()[1:]]
    assert told[:20] == list(range(10, 210, 10))
    later = list(itertools.pairwise(told))[20:]
    assert len(later) > 40
    # At a line the silence has lasted a twentieth of the stage; a second before, it had not.
    assert all(line - last >= line / 20 and line - 1 - last < (line - 1) / 20 for last, line in later)


def test_a_resumed_stage_is_paced_from_where_it_resumed() -> None:
    """80 of 100 exist already; then 5 every 20 s: after 90, 10 more take 40 s."""
    now, stream = [5.0], io.StringIO()
    with show_bars(stream, clock=lambda: now[0]) as shown:
        bar = Bar(shown, "answering")
        for now[0], finished in ((5.0, 80), (25.0, 85), (45.0, 90), (85.0, 100)):
            bar.update(finished, 100, "loss 1")
    assert stream.getvalue().splitlines() == [
        "answering: 85/100, loss 1",
        "answering: 90/100, loss 1, 40 s left",
        "answering: 100/100, loss 1",
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_bars_and_keeps_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    now, stream, (questions, teacher) = [0.0], Terminal(), stages(tmp_path)
    with show_bars(stream, clock=lambda: now[0]) as shown:
        display = RunDisplay(shown, tmp_path, [teacher])
        display.started(questions, 1, 2)
        for now[0], finished in ((1.0, 10), (2.0, 20), (3.0, 30)):
            display.progress(questions, finished, 90, "loss 0.5")
        shown.refresh()
        display.ended(questions, "failed", 4.0)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue())
    assert re.search(r"^questions witnesses \S+ +30/90 loss 0.5 6.0 s left", text, re.MULTILINE)
    assert re.search(r"stages \S+ +1/2", text)
    assert text.splitlines().count("questions witnesses: failed in 4.0 s") == 1


def test_short_commands_print_nothing_without_a_terminal(capsys: Capture) -> None:
    with show_progress("measuring", 3) as tick:
        for _ in range(3):
            tick()
    assert capsys.readouterr() == ("", "")


def trainings(method: str, count: int) -> list[Stage]:
    """Trainings of one method without what they need, so that nothing else is missing."""
    graph = Graph(load_recipe("quickstart"))
    return [replace(graph.plan_training("witnesses", n, method, "matched", 1e-3), needs={}) for n in range(count)]


def displayed(tmp_path: Path, goals: list[Stage], now: list[float]) -> RunDisplay:
    with show_bars(io.StringIO(), clock=lambda: now[0]) as shown:
        return RunDisplay(shown, tmp_path, goals)


def test_what_is_left_is_what_such_stages_took(tmp_path: Path) -> None:
    """Of four trainings of dpo one took 60 s: about 3 x 60 s; half a minute into the next one, 150 s."""
    dpo, now = trainings("dpo", 4), [0.0]
    display = displayed(tmp_path, dpo, now)
    assert display.describe_time_left() == ""
    display.ended(dpo[0], "done", 60.0)
    assert display.describe_time_left() == "about 3 min left"
    display.started(dpo[1], 2, 4)
    now[0] += 30.0
    assert display.describe_time_left() == "about 2 min left"
    for stage in dpo[1:]:
        display.ended(stage, "failed", 1.0)
    assert display.describe_time_left() == ""


def test_another_method_is_guessed_by_trainings_of_its_sort(tmp_path: Path) -> None:
    """dpo took 60 s, dpo+bce 20 s: another dpo 60 s, an unseen preference method the mean, 40 s; rcft nobody knows."""
    dpo, bce, catto, rcft = (
        trainings("dpo", 2),
        trainings("dpo+bce", 1),
        trainings("dpo+catto", 1),
        trainings("rcft", 1),
    )
    display = displayed(tmp_path, [*dpo, *bce, *catto, *rcft], [0.0])
    display.ended(dpo[0], "done", 60.0)
    display.ended(bce[0], "done", 20.0)
    assert display.describe_time_left() == f"more than {format_duration(100.0)} left"
    display.ended(rcft[0], "done", 500.0)
    assert display.describe_time_left() == f"about {format_duration(100.0)} left"


def test_an_unseen_kind_makes_it_more_than(tmp_path: Path) -> None:
    dpo = trainings("dpo", 3)
    display = displayed(tmp_path, [*dpo, Stage("report", "report", StageSettings())], [0.0])
    display.ended(dpo[0], "done", 4.0)
    assert display.describe_time_left() == ""  # more than 8 s says nothing
    display.ended(dpo[1], "done", 60.0)
    assert display.describe_time_left() == "more than 32 s left"
