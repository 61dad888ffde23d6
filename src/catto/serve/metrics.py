"""The metrics that the gateway serves at `/metrics`, in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from catto.engines.server import ServerEngine
from catto.serve.feedback_log import FeedbackLog

LATENCY_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class _ScrapedNumbers(Collector):
    """Metrics that are computed whenever they are requested."""

    def __init__(self, log: FeedbackLog, engine: ServerEngine) -> None:
        self.log = log
        self.engine = engine

    def collect(self) -> Iterable[Metric]:
        """Yield the number of upstream retries, the rolling calibration and the state of the alarm."""
        yield CounterMetricFamily("catto_upstream_retries", "Retried upstream requests", value=self.engine.retries)
        for name, value in self.log.summarise_rolling().items():
            yield GaugeMetricFamily(name, "Calibration of the last answers with feedback", value=value)
        for name, value in self.log.summarise_alarm().items():
            yield GaugeMetricFamily(name, "Whether feedback shows more errors than promised", value=value)


class GatewayMetrics:
    """Counts since the gateway was started, and the calibration of the last graded answers.

    Args:
        log: The feedback log, for calibration and alarm.
        engine: The upstream, for its retries.
    """

    def __init__(self, log: FeedbackLog, engine: ServerEngine) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_ScrapedNumbers(log, engine))
        self.requests = Counter("catto_requests", "Requests by status", ["status"], registry=self.registry)
        self.seconds = Histogram(
            "catto_request_seconds", "Time to the reply", buckets=LATENCY_BUCKETS, registry=self.registry
        )
        self.samples = Counter("catto_samples", "Samples of the upstream", registry=self.registry)
        self.abstentions = Counter("catto_abstained", "Abstentions", registry=self.registry)
        self.in_flight = Gauge("catto_in_flight", "Chat requests in progress", registry=self.registry)

    def count_reply(self, status: int, seconds: float) -> None:
        """Count a reply by status, and record how long it took."""
        self.requests.labels(status=str(status)).inc()
        self.seconds.observe(seconds)

    def count_answer(self, reply_fields: Mapping[str, Any]) -> None:
        """Count the samples of an answer, and the answer itself if it is an abstention.

        Args:
            reply_fields: The `catto` object of the answer.
        """
        self.samples.inc(reply_fields["k"])
        if reply_fields["abstained"]:
            self.abstentions.inc()

    def render_text(self) -> str:
        """Render all metrics in Prometheus' text format."""
        return generate_latest(self.registry).decode()
