"""`catto serve`: a gateway in front of a model's server, whose answers carry a calibrated confidence or abstain."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from catto.cli.console import check_name, needs, refuse, refusing, say, warn, writable_file
from catto.cli.data import choose_source
from catto.cli.options import Real, list_tasks
from catto.engines.replies import ServerError
from catto.io.record_files import read_record
from catto.recipe.settings import MOST_SAMPLES
from catto.records import Protocol
from catto.tasks import TASKS

MOST = "most confident"
DEFAULT = "the threshold's, else "
LOCAL = ("127.0.0.1", "localhost", "::1")


def serve(
    upstream: Annotated[str, Option(help="The model's server: its address, ending in /v1.")],
    task: Annotated[str, Option(help="Task with the labels, or a YAML file of one.", autocompletion=list_tasks)],
    calibrator: Annotated[Path | None, Option(help="What `catto calibrate fit` wrote.")] = None,
    threshold: Annotated[Path | None, Option(help="Abstain below: what `calibrate threshold` wrote.")] = None,
    model: Annotated[str | None, Option(help="The upstream's model.", show_default="its only one")] = None,
    k: Annotated[int | None, Option(min=1, max=MOST_SAMPLES, help="Samples.", show_default=DEFAULT + "1")] = None,
    rule: Annotated[str | None, Option(help="How one is chosen.", show_default=DEFAULT + MOST)] = None,
    temperature: Annotated[float | None, Real(min=0, max=2, help="Of samples.", show_default=DEFAULT + "0")] = None,
    stop: Annotated[float | None, Real(min=0, max=1, help="Stop at this confidence, or a settled vote.")] = None,
    max_k: Annotated[int, Option(min=1, max=MOST_SAMPLES, help="Most samples that a request may ask for.")] = 16,
    concurrency: Annotated[
        int, Option(min=1, max=10_000, help="Maximum number of requests in progress; more get status 429.")
    ] = 64,
    deadline: Annotated[float, Real(min=1, max=1e6, help="Seconds for an answer, including retries.")] = 120.0,
    abstention: Annotated[str, Option(help="What is answered below the threshold.")] = "I do not know.",
    log: Annotated[Path | None, Option(help="Keep confidences here, a .jsonl file, for feedback.")] = None,
    host: Annotated[str, Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="Port to listen at.")] = 8080,
) -> None:
    """Serve OpenAI's chat completions with a calibrated confidence in every answer, or an abstention.

    A request is sent to the upstream k times, with log-probabilities. The label is read as in `catto eval`, its
    confidence calibrated, one answer chosen and returned with a `catto` object. Below the threshold the gateway says
    that it abstains. Keys: OPENAI_API_KEY is sent to the upstream, CATTO_API_KEY is asked of clients where it is set.

    Examples:
    catto serve --upstream http://localhost:8000/v1 --task commonsense_qa --calibrator tau.json
    catto serve --upstream http://localhost:8000/v1 --task snli --calibrator tau.json --threshold threshold.json
    catto serve --upstream http://localhost:8000/v1 --task mmlu --k 5 --temperature 1 --stop 0.95
    """
    for package in ("fastapi", "uvicorn", "prometheus_client"):
        needs(package, "serve", "catto serve")
    from catto.calibrate import RiskThreshold, open_fitted
    from catto.engines.server import ServerEngine
    from catto.metrics.selection import RULES
    from catto.serve.answering import Answerer
    from catto.serve.gateway import Gateway, Limits, run_gateway

    with refusing(place="--task: "):
        source = choose_source(task)
    if isinstance(source, str):
        check_name("--task", source, TASKS)
        source = TASKS[source]
    if log is not None:
        writable_file("--log", log)
    fitted = None if calibrator is None else open_fitted(calibrator)
    limit = None if threshold is None else read_record(threshold, RiskThreshold)
    if limit is not None and limit.calibrator != (fitted.digest if fitted else None):
        refuse(f"{threshold}: fitted with {'another calibrator' if fitted else 'a calibrator'}: give that one")
    key = os.environ.get("CATTO_API_KEY", "").strip() or None
    if key is None and host not in LOCAL:
        warn(f"CATTO_API_KEY is not set: everyone who reaches {host} can use the upstream")
    given = {"k": k, "rule": rule, "temperature": temperature, "stop": stop}
    plain = Protocol(rule=MOST, k=1, temperature=0.0, fallback="answer")
    base = limit.protocol if limit else (fitted.protocol if fitted else None) or plain
    protocol = base.model_copy(update={name: value for name, value in given.items() if value is not None})
    check_name("--rule", protocol.rule, RULES)
    if protocol.k > 1 and protocol.temperature == 0:
        refuse(f"--k {protocol.k} at temperature 0: all samples would be the same, give a --temperature")
    with refusing(ServerError, place="--upstream: "):
        bounds: Any = {"timeout": deadline, "deadline": deadline, "concurrency": concurrency}
        engine = ServerEngine(upstream, model or "", max_retries=2, top_logprobs=20, **bounds)
        if model is None:
            engine.find_model()
        engine.probe(warn)
    if not engine.continues and protocol.fallback is not None:
        protocol = protocol.model_copy(update={"fallback": "none"})
    if limit is not None and limit.protocol != protocol:
        warn(f"{threshold}: its guarantee is for {limit.protocol!r}, this is {protocol!r}: no answer gets it")
    elif fitted is not None and fitted.protocol not in (None, protocol):
        warn(f"{calibrator}: fitted on answers of {fitted.protocol!r}, this is {protocol!r}: no answer is calibrated")
    if limit is not None and limit.models and engine.model not in limit.models:
        warn(f"{threshold}: its guarantee is for {', '.join(limit.models)}: no answer of {engine.model} gets it")
    limits = Limits(concurrency=concurrency, max_k=max(max_k, protocol.k), deadline=deadline, key=key)
    answerer = Answerer(engine, engine.client(), fitted, limit, abstention)
    with refusing(OSError, place=f"--host {host} --port {port}: "):
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.create_server(address[:2], family=family) as free:  # it is not, or no such host: said at once
            port = free.getsockname()[1]
    say(f"Serving {engine.model} of {engine.base_url} at http://{f'[{host}]' if ':' in host else host}:{port}/v1")
    run_gateway(Gateway(answerer, source.labels, protocol, limits, log), host, port)
