"""The metrics of /metrics, in Prometheus' text format."""

import asyncio
import math
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from terra.engine.base import Engine

_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
_TOKENS = (0, 1, 2, 4, 8, 16, 32, 64, 128)


class _Passes(Collector):
    """The histogram of an engine's `EngineCounters.passes`."""

    def __init__(self) -> None:
        self.counts: Sequence[int] = ()

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """The histogram as it is now."""
        found = HistogramMetricFamily("terra_engine_pass_tokens", "Tokens that a pass of the engine gave to a session")
        buckets = [(f"{most:.1f}", float(sum(self.counts[: most + 1]))) for most in _TOKENS]
        buckets.append(("+Inf", float(sum(self.counts))))
        found.add_metric([], buckets, sum_value=float(sum(n * count for n, count in enumerate(self.counts))))
        yield found


class Metrics:
    """Counters and histograms of one server, in a registry of its own."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        registry = self._registry
        ProcessCollector(registry=registry)  # memory, time and open files, on Linux
        self._frames = Counter("terra_frames", "Frames generated", ["kind"], registry=registry)
        self._first = Histogram(
            "terra_first_frame_seconds",
            "From asking to the first generated frame",
            ["kind"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._latency = Histogram(
            "terra_live_latency_seconds", "From an action chosen to its frame sent", buckets=_SECONDS, registry=registry
        )
        self._sessions = Gauge("terra_live_sessions", "Live sessions open", registry=registry)
        self._jobs = Gauge("terra_jobs", "Video jobs by status", ["status"], registry=registry)
        self._ended = Counter("terra_jobs_ended", "Video jobs ended by status", ["status"], registry=registry)
        self._requests = Counter(
            "terra_http_requests", "HTTP requests", ["method", "route", "status"], registry=registry
        )
        self._seconds = Histogram("terra_http_seconds", "HTTP requests", ["route"], buckets=_SECONDS, registry=registry)
        self._tokens = Gauge("terra_engine_tokens", "Tokens of the engine since its start", ["kind"], registry=registry)
        self._passes = _Passes()
        registry.register(self._passes)
        self._kv = Gauge(
            "terra_engine_kv_cache_usage", "Share of the KV cache in use, NaN where there is none", registry=registry
        )
        self._tasks = Gauge("terra_event_loop_tasks", "Tasks of the server's event loop", registry=registry)
        self._up = Gauge("terra_engine_up", "1 while the engine works, 0 once it has failed", registry=registry)

    def live_frame(self, latency: float) -> None:
        """Count a live session's frame, sent `latency` seconds after its action was chosen."""
        self._frames.labels("live").inc()
        self._latency.observe(latency)

    def job_frame(self) -> None:
        """Count a generated frame of a job."""
        self._frames.labels("job").inc()

    def first_frame(self, seconds: float, kind: str = "live") -> None:
        """Record the seconds from a request to its first generated frame."""
        self._first.labels(kind).observe(seconds)

    def sessions(self, count: int) -> None:
        """Set the number of open live sessions."""
        self._sessions.set(count)

    def job_ended(self, status: str) -> None:
        """Count an ended job by status."""
        self._ended.labels(status).inc()

    def request(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count an answered request; `route` is the route's pattern, never the path that a client sent."""
        self._requests.labels(method, route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def text(self, engine: Engine, jobs: Mapping[str, int]) -> bytes:
        """Format all metrics, with the engine's own (`counters` and `failure`) and the number of jobs by status.

        Call this method in the event loop, because it counts the loop's tasks.
        """
        self._tasks.set(len(asyncio.all_tasks()))
        for status, count in jobs.items():
            self._jobs.labels(status).set(count)
        counters = engine.counters
        for kind, count in vars(counters).items():
            if kind not in ("kv_cache_usage", "passes"):
                self._tokens.labels(kind).set(count)
        self._passes.counts = counters.passes
        self._kv.set(math.nan if counters.kv_cache_usage is None else counters.kv_cache_usage)
        self._up.set(engine.failure is None)
        return generate_latest(self._registry)
