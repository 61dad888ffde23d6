"""`catto serve`: a gateway to a model's server that adds a calibrated confidence to each answer, or abstains."""

from __future__ import annotations

import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from catto.cli.console import check_name, refuse, refuse_errors, require_package, require_writable_file, say, warn
from catto.cli.data import choose_source
from catto.cli.options import ADVANCED, INPUT, MODEL, OUTPUT, Real, expand_options, list_tasks
from catto.engines.replies import ServerError
from catto.io.record_files import read_record
from catto.prompts import OPEN_WORDING
from catto.recipe.settings import MAX_SAMPLES
from catto.records import ConfidenceKind, Grade, Protocol
from catto.tasks import TASKS
from catto.tasks.answer_map import AnswerMap

if TYPE_CHECKING:
    from catto.calibrate import Fitted, RiskThreshold
    from catto.engines.server import ServerEngine
    from catto.serve.answering import Answerer
    from catto.serve.feedback_log import FeedbackLog

# How answers are chosen unless an option, the threshold or the calibrator says otherwise.
DEFAULT_PROTOCOL = Protocol(rule="most confident", k=1, temperature=0.0, fallback="answer")
LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class AnsweringOptions:
    """How an answer is chosen from samples, as given on the command line; None means as in the threshold file."""

    k: Annotated[
        int | None,
        Option(
            min=1,
            max=MAX_SAMPLES,
            help="Number of samples per question.",
            show_default="as in the threshold file, else 1",
            rich_help_panel=MODEL,
        ),
    ] = None
    rule: Annotated[
        str | None,
        Option(
            help="Rule that chooses one of the samples.",
            show_default="as in the threshold file, else most confident",
            rich_help_panel=MODEL,
        ),
    ] = None
    temperature: Annotated[
        float | None,
        Real(
            min=0,
            max=2,
            help="Sampling temperature; 0 means greedy decoding.",
            show_default="as in the threshold file, else 0",
            rich_help_panel=MODEL,
        ),
    ] = None
    confidence_kind: Annotated[
        ConfidenceKind | None,
        Option(
            help="Kind of confidence, for tasks without answer options.",
            show_default="as in the threshold file, else ptrue",
            rich_help_panel=MODEL,
        ),
    ] = None
    stop: Annotated[
        float | None,
        Real(
            min=0,
            max=1,
            help="Stop sampling at this confidence, or when more votes cannot change the result.",
            rich_help_panel=MODEL,
        ),
    ] = None


@dataclass(frozen=True)
class GatewayOptions:
    """Where the gateway listens and what it allows, as given on the command line."""

    host: Annotated[str, Option(help="Address to listen on.", rich_help_panel=OUTPUT)] = "127.0.0.1"
    port: Annotated[
        int, Option(min=0, max=65535, help="Port to listen on; 0 picks a free one.", rich_help_panel=OUTPUT)
    ] = 8080
    log: Annotated[
        Path | None,
        Option(help="JSON lines file to log every confidence and the clients' feedback to.", rich_help_panel=OUTPUT),
    ] = None
    abstention: Annotated[str, Option(help="Text of the reply below the threshold.", rich_help_panel=OUTPUT)] = (
        "I do not know."
    )
    max_k: Annotated[
        int,
        Option(
            min=1,
            max=MAX_SAMPLES,
            help="Maximum number of samples that a client may request.",
            rich_help_panel=ADVANCED,
        ),
    ] = 16
    concurrency: Annotated[
        int,
        Option(
            min=1,
            max=10_000,
            help="Maximum number of requests in progress; further ones get status 429.",
            rich_help_panel=ADVANCED,
        ),
    ] = 64
    deadline: Annotated[
        float, Real(min=1, max=1e6, help="Maximum seconds per answer, including retries.", rich_help_panel=ADVANCED)
    ] = 120.0


@expand_options
def serve(
    upstream: Annotated[
        str, Option(help="Address of the model's OpenAI-compatible server, ending in /v1.", rich_help_panel=INPUT)
    ],
    task: Annotated[
        str,
        Option(
            help="Task that the requests belong to: its name or its YAML file.",
            autocompletion=list_tasks,
            rich_help_panel=INPUT,
        ),
    ],
    answering: AnsweringOptions,
    options: GatewayOptions,
    calibrator: Annotated[
        Path | None,
        Option(
            help="Calibrator written by `catto calibrate fit`, or a model folder with a calibrator and a threshold.",
            show_default="that of the model, if its name is a folder",
            rich_help_panel=INPUT,
        ),
    ] = None,
    threshold: Annotated[
        Path | None,
        Option(
            help="Threshold written by `catto calibrate threshold`; the gateway abstains below it.",
            rich_help_panel=INPUT,
        ),
    ] = None,
    model: Annotated[
        str | None,
        Option(help="Name of the model on the server.", show_default="the only one", rich_help_panel=MODEL),
    ] = None,
) -> None:
    """Serve OpenAI's chat completions API with a calibrated confidence for every answer, or an abstention.

    The gateway sends each request to the upstream server k times, reads the labels and their log-probabilities as
    `catto eval` does, calibrates the confidences and chooses one answer. The reply contains an additional object
    `catto` with the confidence.

    OPENAI_API_KEY is the key for the upstream server. If CATTO_API_KEY is set, clients must send that key.

    Examples:
    catto serve --upstream http://localhost:8000/v1 --task commonsense_qa --calibrator tau.json
    catto serve --upstream http://localhost:8000/v1 --task snli --calibrator tau.json --threshold threshold.json
    catto serve --upstream http://localhost:8000/v1 --task mmlu --calibrator my-model --log answers.jsonl
    catto serve --upstream http://localhost:8000/v1 --task mmlu --k 5 --temperature 1 --stop 0.95
    """
    for package in ("fastapi", "uvicorn", "prometheus_client"):
        require_package(package, "serve", "catto serve")
    from catto.model_calibration import has_calibrator
    from catto.serve.gateway import Gateway, Limits, run_gateway

    served = _find_task(task)
    if options.log is not None:
        require_writable_file("--log", options.log)
    calibration = _read_calibration(calibrator, threshold)
    client_key = _read_client_key(options.host)
    # Wrong options are refused before the server is asked.
    protocol = _check_kind(_choose_protocol(answering, calibration), served)
    engine = _connect_upstream(upstream, model, options)
    model_folder = Path(engine.served_name)  # local servers name a model after its folder
    if calibrator is None and threshold is None and has_calibrator(model_folder):
        calibration = _read_calibration(model_folder, None)
        protocol = _check_kind(_choose_protocol(answering, calibration), served)
        say(f"Using the calibrator of {model_folder}.")
    # If a response has no readable answer, a label is forced by continuing the response. Not every server can do this.
    can_force_label = engine.can_continue
    if protocol.fallback is not None and not can_force_label:
        protocol = protocol.model_copy(update={"fallback": "none"})
    _warn_about_protocol(protocol, engine.model, calibration)
    limits = Limits(
        concurrency=options.concurrency,
        max_k=max(options.max_k, protocol.k),  # requests without k of their own use that of the protocol
        deadline=options.deadline,
        key=client_key,
    )
    answerer = _make_answerer(engine, calibration, served, options.abstention)
    port = _find_port(options.host, options.port)
    shown_host = f"[{options.host}]" if ":" in options.host else options.host  # an IPv6 address needs brackets
    say(f"Serving {engine.model} from {engine.base_url} at http://{shown_host}:{port}/v1")
    gateway = Gateway(answerer, served.labels, protocol, limits, options.log)
    _report_alarm(gateway.log)  # the log of earlier runs may contradict the promised error rate
    run_gateway(gateway, options.host, port)


@dataclass(frozen=True)
class ServedTask:
    """The properties of a task that serving needs.

    Attributes:
        labels: The labels; empty if answers are short texts or numbers.
        grade: How answers without labels are compared.
        brief: Whether the task's prompts leave the form of a judgement unexplained.
    """

    labels: tuple[str, ...]
    grade: Grade = "exact"
    brief: bool = False


@dataclass(frozen=True)
class ServedCalibration:
    """The calibrator and the threshold in use, and the paths from which they were read.

    Attributes:
        fitted: The calibrator; None if answers are not calibrated.
        calibrator_path: Its file, or the folder of its model; None if answers are not calibrated.
        risk_threshold: The threshold below which the gateway abstains; None if it never abstains.
        threshold_path: Its file, or the folder of its model; has no meaning without a threshold.
    """

    fitted: Fitted | None
    calibrator_path: Path | None
    risk_threshold: RiskThreshold | None
    threshold_path: Path | None


def _read_client_key(host: str) -> str | None:
    """Return the key that clients must send; warn if there is none and other machines can reach the gateway."""
    key = os.environ.get("CATTO_API_KEY", "").strip()
    if key:
        return key
    if host not in LOCAL_HOSTS:
        warn(f"CATTO_API_KEY is not set: everyone who reaches {host} can use the upstream")
    return None


def _find_task(task: str) -> ServedTask:
    """Return the properties of a task, given by its name or its YAML file; refuse an unknown task."""
    with refuse_errors(place="--task: "):
        source = choose_source(task)
    if isinstance(source, str):
        check_name("--task", source, TASKS)
        source = TASKS[source]
    if source.labels:
        return ServedTask(source.labels)
    grade: Grade | None = "number"  # the only task without options and without a map has numbers as answers
    row_map = next(iter(source.maps), None)
    if isinstance(row_map, AnswerMap):
        grade = row_map.grade
    wording = OPEN_WORDING.get(source.name)
    is_brief = wording is not None and wording.brief
    return ServedTask((), grade or "exact", brief=is_brief)


def _check_kind(protocol: Protocol, served: ServedTask) -> Protocol:
    """Return the protocol with a kind of confidence that fits the task; refuse a kind that does not.

    For a task without labels, the default kind is P(True): the probability that the model calls its own answer right.
    """
    kind = protocol.confidence_kind
    if served.labels:
        if kind not in (None, "label"):
            refuse(f"confidence kind {kind}: served for tasks without options only")
        return protocol
    if kind is None:
        kind = "ptrue"
    if kind == "label":
        refuse("confidence kind label: the task has no options, expected agreement, ptrue or verbal")
    # The majority vote stops without reading confidences, once further votes cannot change it.
    reads_confidence_early = protocol.stop is not None and protocol.rule != "majority vote"
    if kind == "agreement" and reads_confidence_early:
        refuse("--stop: agreement is only known after all samples")
    # Only labels can be forced, so there is no fallback.
    return protocol.model_copy(update={"confidence_kind": kind, "fallback": None})


def _read_calibration(calibrator: Path | None, threshold: Path | None) -> ServedCalibration:
    """Read the calibrator and the threshold; refuse a threshold that was fitted with a different calibrator.

    Args:
        calibrator: File of a calibrator, or folder of a model with a calibrator and perhaps a threshold; None for no
            calibrator.
        threshold: File of a threshold; None uses that of the model's folder, if there is one.
    """
    from catto.calibrate import RiskThreshold
    from catto.model_calibration import load_calibrator

    fitted = None
    stored_threshold = None
    if calibrator is not None:
        calibration = load_calibrator(calibrator)
        fitted = calibration.fitted
        stored_threshold = calibration.threshold
    if threshold is None:
        return ServedCalibration(fitted, calibrator, stored_threshold, threshold_path=calibrator)
    risk_threshold = read_record(threshold, RiskThreshold)
    if fitted is None and risk_threshold.calibrator is not None:
        refuse(f"{threshold}: was fitted with a calibrator; add it with --calibrator")
    if fitted is not None and risk_threshold.calibrator != fitted.digest:
        refuse(f"{threshold}: was fitted with a different calibrator from {calibrator}")
    return ServedCalibration(fitted, calibrator, risk_threshold, threshold_path=threshold)


def _choose_protocol(answering: AnsweringOptions, calibration: ServedCalibration) -> Protocol:
    """Return the protocol of the threshold, else of the calibrator, else the default one, changed by the options.

    An option that is not given leaves the protocol as it is.
    """
    from catto.metrics.selection import RULES

    protocol = DEFAULT_PROTOCOL
    fitted = calibration.fitted
    if calibration.risk_threshold is not None:
        protocol = calibration.risk_threshold.protocol
    elif fitted is not None and fitted.protocol is not None:
        protocol = fitted.protocol
    given_options = {name: value for name, value in asdict(answering).items() if value is not None}
    protocol = protocol.model_copy(update=given_options)
    check_name("--rule", protocol.rule, RULES)
    if protocol.k > 1 and protocol.temperature == 0:
        refuse(f"--k {protocol.k} at temperature 0: all samples would be the same, give a --temperature")
    return protocol


def _connect_upstream(upstream: str, model: str | None, options: GatewayOptions) -> ServerEngine:
    """Find the model on the upstream server, and test which features the server has.

    The command is refused if the server does not answer or returns no log-probabilities.

    Args:
        upstream: Address of the server.
        model: Name of the model on the server. With None, the server must have exactly one model, which is used.
        options: Options of the gateway.

    Returns:
        The engine that sends requests to the model.
    """
    from catto.engines.server import ServerEngine

    with refuse_errors(ServerError, place="--upstream: "):
        engine = ServerEngine(
            upstream,
            model or "",  # `find_model` sets the name
            max_retries=2,  # a client is waiting for the reply
            top_logprobs=20,  # the maximum; `probe` lowers it to what the server accepts
            deadline=options.deadline,
            timeout=options.deadline,  # no shorter limit on silence: a server sends nothing until the reply is complete
            concurrency=options.concurrency,
        )
        if model is None:
            engine.find_model()
        engine.probe(warn)
    return engine


def _make_answerer(
    engine: ServerEngine, calibration: ServedCalibration, served: ServedTask, abstention: str
) -> Answerer:
    """Return the object that answers requests, by labels or by short texts."""
    from catto.serve.answering import Answerer
    from catto.serve.short_answering import ShortAnswerer

    client = engine.make_client()
    fitted = calibration.fitted
    risk_threshold = calibration.risk_threshold
    if served.labels:
        return Answerer(engine, client, fitted, risk_threshold, abstention)
    return ShortAnswerer(engine, client, fitted, risk_threshold, abstention, grade=served.grade, brief=served.brief)


def _warn_about_protocol(protocol: Protocol, model: str, calibration: ServedCalibration) -> None:
    """Warn if the gateway's answers differ from those that the threshold or the calibrator was fitted on.

    Args:
        protocol: How the gateway chooses an answer.
        model: Name of the model on the server.
        calibration: The calibrator and the threshold. Each was fitted on answers of a protocol; a calibrator of single
            samples has none and fits every protocol. A threshold may also list the models of these answers.
    """
    fitted = calibration.fitted
    risk_threshold = calibration.risk_threshold
    threshold_path = calibration.threshold_path
    if risk_threshold is not None and risk_threshold.protocol != protocol:
        warn(
            f"{threshold_path}: was fitted on answers with {risk_threshold.protocol!r}, but this gateway uses "
            f"{protocol!r}: no answer has the guarantee"
        )
    elif fitted is not None and fitted.protocol not in (None, protocol):
        warn(
            f"{calibration.calibrator_path}: was fitted on answers with {fitted.protocol!r}, but this gateway uses "
            f"{protocol!r}: no answer is calibrated"
        )
    fitted_models = () if risk_threshold is None else risk_threshold.models  # empty if the threshold lists none
    if fitted_models and model not in fitted_models:
        models = ", ".join(fitted_models)
        warn(f"{threshold_path}: was fitted on answers of {models}: no answer of {model} has the guarantee")


def _report_alarm(log: FeedbackLog) -> None:
    """Print whether the feedback logged by earlier runs contradicts the promised error rate."""
    if log.path is None or log.alarm.answers == 0:
        return
    if log.alarm.is_raised:
        warn(f"{log.path}: ALARM: {log.describe_alarm()}")
    else:
        say(f"{log.path}: {log.describe_alarm()}.")


def _find_port(host: str, port: int) -> int:
    """Refuse an address that cannot be used, and replace port 0 with a free port."""
    with refuse_errors(OSError, place=f"--host {host} --port {port}: "):
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.create_server(address[:2], family=family) as probe:
            return int(probe.getsockname()[1])
