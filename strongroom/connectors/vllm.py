"""Strongroom in vLLM 0.32: glue between its connector interface and `lookups`, `transfers`.

    KVTransferConfig(kv_connector="StrongroomConnector",
                     kv_connector_module_path="strongroom.connectors.vllm",
                     kv_role="kv_both", kv_load_failure_policy="recompute",
                     kv_connector_extra_config={"socket": ..., "token_file": ...})

A request brings its grant in `kv_transfer_params={"strongroom": {"grant": ...}}` and its salt as
`cache_salt`. Rules:
- Wrong settings stop the engine's start with their name. After that no hook raises: what fails
  is logged and becomes a miss, and a request that can't be judged skips vLLM's prefix cache.
- An engine that can't be described (`vllm_shape.Unsupported`) runs without any prefix cache: a
  hit there would need no grant.
- Nothing is ever put into the parameters that `request_finished` returns: they reach the client.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from strongroom.blocks import pack_tokens
from strongroom.connectors.client import LinkTimes, Receiver, SidecarLink, read_token
from strongroom.connectors.digests import measure
from strongroom.connectors.lookups import Ask, Lookups, Standing
from strongroom.connectors.orders import LoadOrder, StepOrders
from strongroom.connectors.pages import pages_of
from strongroom.connectors.reports import EngineMeter, ReportBeat
from strongroom.connectors.settings import ConnectorSettings
from strongroom.connectors.transfers import Report, Transfers
from strongroom.connectors.vllm_shape import Shape, Unsupported, describe, model_files
from strongroom.errors import Misuse, StrongroomError
from strongroom.wire.frames import (
    PROTOCOL_VERSION,
    Digests,
    Hello,
    KVFormatFields,
    LayoutFields,
)

_log = logging.getLogger(__name__)


@dataclass
class StrongroomMetadata(KVConnectorMetadata):  # type: ignore[misc] # vllm is untyped here
    """One step's orders, from the scheduler's side to every worker."""

    orders: StepOrders


class StrongroomConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """One object for the scheduler, one for each worker; `role` says which this is."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _adopt_logging()
        transfer = vllm_config.kv_transfer_config
        self._settings = ConnectorSettings.parse(transfer.kv_connector_extra_config)
        if transfer.kv_load_failure_policy != "recompute":
            raise Misuse(
                "set kv_load_failure_policy='recompute': with "
                f"{transfer.kv_load_failure_policy!r} a load that fails would fail its request",
                field="kv_load_failure_policy",
            )
        if transfer.kv_role != "kv_both":
            raise Misuse("set kv_role='kv_both': it loads and saves", field="kv_role")
        self._engine = self._settings.engine or transfer.engine_id
        self._link: SidecarLink | None = None
        self._lookups: Lookups | None = None
        self._transfers: Transfers | None = None
        self._meter = EngineMeter()
        self._requests: dict[str, Any] = {}
        self._unjudged: list[Any] = []
        self._unserved: list[LoadOrder] = []
        self._failed_pages: set[int] = set()
        self._told: set[str] = set()
        if role == KVConnectorRole.SCHEDULER:
            self._start_scheduler()

    @property
    def requires_kv_delivery(self) -> bool:
        """A dropped save is a future miss, never a reason to recompute."""
        return False

    # The scheduler's side.

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Count its pages; one of them is a placeholder that no request ever gets."""
        self._meter.pages_from(
            lambda: (gpu_block_pool.num_gpu_blocks - 1, gpu_block_pool.get_num_free_blocks())
        )

    def on_new_request(self, request: Any) -> None:
        """Ask the sidecar; a request that is refused here never sees the prefix cache."""
        standing = Standing.REFUSED
        try:
            if self._lookups is not None:
                standing = self._lookups.open(request.request_id, self._ask(request))
                self._requests[request.request_id] = request
        except Exception:  # noqa: BLE001 - an exception here would kill the engine for everybody
            _log.exception("a request could not be looked up")
            standing = Standing.REFUSED
        if standing is Standing.REFUSED:
            request.skip_reading_prefix_cache = True

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Memory only, idempotent; see `Lookups.matched`.

        vLLM has its local hit in hand here, and any number lets it keep that hit. So a request
        that could not be judged asks again, once: `build_connector_meta` tells it to skip.
        """
        if request.skip_reading_prefix_cache:
            return 0, False  # told in an earlier step: there was no local hit
        if self._lookups is None:
            self._unjudged.append(request)
            return None, False
        try:
            tokens = self._lookups.matched(
                request.request_id, num_computed_tokens, request.num_tokens
            )
        except Exception:  # noqa: BLE001 - a miss, as everywhere
            _log.exception("a lookup failed; its request goes without any cache")
            self._unjudged.append(request)
            return None, False
        return (None, False) if tokens is None else (tokens, tokens > 0)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Draw up the load; vLLM now waits for it, so failing to is reported too."""
        if num_external_tokens <= 0 or self._lookups is None:
            return
        try:
            pages = blocks.get_block_ids()[0]
            self._lookups.allocated(request.request_id, num_external_tokens, pages)
        except Exception:  # noqa: BLE001 - a miss, as everywhere
            _log.exception("a load could not be ordered")
            self._lookups.lost(request.request_id)

    def build_connector_meta(self, scheduler_output: Any) -> StrongroomMetadata:
        """This step's orders. Refusals are told to vLLM here, outside of any lookup."""
        for request in self._unjudged:
            request.skip_reading_prefix_cache = True
        self._unjudged.clear()
        lookups = self._lookups
        if lookups is None:
            return StrongroomMetadata(StepOrders())
        self._measure(lookups, scheduler_output)
        try:
            self._skip(lookups.settle(scheduler_output.preempted_req_ids or ()))
            state = scheduler_output.kv_connector_block_state
            for key, tokens in scheduler_output.num_scheduled_tokens.items():
                request = self._requests.get(key)
                if request is not None and state is not None:
                    computed = request.num_computed_tokens + tokens
                    lookups.scheduled(key, computed, partial(_pages_of, state, key))
        except Exception:  # noqa: BLE001 - orders that are drawn up must go out all the same
            _log.exception("a step could not be planned")
            self._skip(list(self._requests))
        idle = not scheduler_output.num_scheduled_tokens
        return StrongroomMetadata(dataclasses.replace(lookups.take_orders(), idle=idle))

    def update_connector_output(self, connector_output: Any) -> None:
        """Learn which loads ended, and refuse what failed before it is scheduled again."""
        if self._lookups is None:
            return
        try:
            self._lookups.loaded(
                connector_output.finished_recving or (),
                connector_output.invalid_block_ids or (),
                connector_output.failed_recving or (),
            )
            self._skip(self._lookups.settle())
        except Exception:  # noqa: BLE001 - a miss, as everywhere
            _log.exception("the workers' report could not be read")
            self._skip(list(self._requests))

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See `request_finished_all_groups`."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Hold the pages of a save that may still be copied. Never any parameters: see above."""
        try:
            self._requests.pop(request.request_id, None)
            if not self._requests:
                self._meter.emptied()
            if self._lookups is None:
                return False, None
            aborted = request.status.name == "FINISHED_ABORTED"
            return self._lookups.finished(request.request_id, aborted=aborted), None
        except Exception:  # noqa: BLE001 - a miss, as everywhere
            _log.exception("a request could not be ended")
            return False, None

    def reset_cache(self) -> bool | None:
        """Forget every verdict. What is stored stays: only a revocation makes it unreadable."""
        if self._lookups is not None:
            self._lookups.forget()
        return True

    # A worker's side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the engine's pages, and connect."""
        try:
            self._start_worker(kv_caches)
        except (StrongroomError, OSError) as error:
            _log.warning("strongroom is off in this worker: %s", error)
        except Exception:  # noqa: BLE001 - an engine without cache is better than none
            _log.exception("strongroom is off in this worker")

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Stop reading pages that this step overwrites."""
        try:
            if self._transfers is not None:
                self._transfers.cancel_saves(kv_connector_metadata.orders.preempted)
        except Exception:  # noqa: BLE001 - a miss, as everywhere
            _log.exception("saves of preempted requests could not be cancelled")

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Start this step's loads; they run beside the engine."""
        loads = self._orders().loads
        if self._transfers is not None:
            self._transfers.start_loads(loads)
        else:
            self._unserved.extend(loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: loads end between steps."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing: pages are copied after the step."""

    def wait_for_save(self) -> None:
        """Offer what became final in this step; the copies run beside the engine."""
        try:
            if self._transfers is not None:
                self._transfers.start_saves(self._orders().saves)
        except Exception:  # noqa: BLE001 - a miss, as everywhere
            _log.exception("a save could not be started")

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Everything that ended since the last step, told once."""
        orders = self._orders()
        held = orders.held
        if orders.idle:
            # An engine in its client's process spins here; without this the IO thread, which
            # the engine waits for, would get the interpreter's lock only every 5 ms.
            time.sleep(0)
        try:
            if self._transfers is not None:
                report = self._transfers.take_report(finished_req_ids, held)
            else:
                report = _all_failed(self._unserved, held)
                self._unserved = []
        except Exception:  # noqa: BLE001 - a miss, as everywhere
            _log.exception("ended transfers could not be reported")
            report = Report(sent=frozenset(held))
        self._failed_pages |= report.failed_pages
        return KVConnectorTransferResults(
            finished_sending=set(report.sent),
            finished_recving=set(report.received),
            failed_recving=set(report.failed),
        )

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """The same for callers of the older hook."""
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending, results.finished_recving

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Pages of the loads reported last that hold nothing good."""
        failed, self._failed_pages = self._failed_pages, set()
        return failed

    def shutdown(self) -> None:
        """End the session."""
        if self._link is not None:
            self._link.close()

    # Below: starting, and reading requests.

    def _start_scheduler(self) -> None:
        try:
            shape = describe(self._vllm_config, self._kv_cache_config, tp_rank=0, pp_rank=0)
            digests = measure(*model_files(self._vllm_config))
        except (StrongroomError, OSError) as error:
            _log.warning(
                "strongroom is off: %s. No request uses a prefix cache, as none can be judged",
                error,
            )
            return
        lookups = Lookups(
            None, shape.layout.page_tokens, deadline_s=self._settings.lookup_deadline_s
        )
        self._link = self._connect("scheduler", shape, digests, lookups)
        lookups.attach(self._link)
        lookups.beat(ReportBeat(self._meter, self._link.send))
        self._lookups = lookups
        self._await_session("scheduler")

    def _start_worker(self, kv_caches: dict[str, torch.Tensor]) -> None:
        from vllm.distributed.parallel_state import (  # noqa: PLC0415 - set up in workers alone
            get_pp_group,
            get_tensor_model_parallel_rank,
        )

        shape = describe(
            self._vllm_config,
            self._kv_cache_config,
            tp_rank=get_tensor_model_parallel_rank(),
            pp_rank=get_pp_group().rank_in_group,
        )
        if set(shape.layers) != set(kv_caches):
            raise Unsupported("the worker's layers are not the group's", field="layers")
        digests = measure(*model_files(self._vllm_config))
        transfers = Transfers(
            pages_of([kv_caches[name] for name in shape.layers], shape.page_count),
            shape.layout,
            load_deadline_s=self._settings.load_deadline_s,
            save_deadline_s=self._settings.save_deadline_s,
            layers=self._settings.layers,
        )
        self._link = self._connect("worker", shape, digests, transfers)
        transfers.attach(self._link)
        self._transfers = transfers
        self._await_session("worker")

    def _connect(
        self, role: str, shape: Shape, digests: Digests, receiver: Receiver
    ) -> SidecarLink:
        settings = self._settings
        kv, layout = shape.format, shape.layout

        def hello() -> Hello:
            return Hello(
                version=PROTOCOL_VERSION,
                engine=self._engine,
                role=role,
                token=read_token(settings.token_file),
                digests=digests,
                format=KVFormatFields(
                    kv.dtype, kv.quantization, kv.layers, kv.kv_heads, kv.head_size,
                    kv.attention, kv.rope,
                ),
                layout=LayoutFields(
                    layout.order, layout.isa, layout.page_tokens, layout.page_bytes,
                    layout.tp_size, layout.tp_rank, layout.pp_size, layout.pp_rank,
                ),
            )  # fmt: skip

        times = LinkTimes(settings.heartbeat_s, settings.silence_s)
        return SidecarLink(settings.socket, hello, receiver, times=times)

    def _await_session(self, role: str) -> None:
        if self._link is None:
            return
        self._link.start()
        if not self._link.wait_open(self._settings.connect_wait_s):
            _log.warning("the %s starts without a sidecar; requests miss until it is there", role)

    def _ask(self, request: Any) -> Ask | None:
        """What the request brought; None if it has no grant or its KV depends on more."""
        parameters = request.kv_transfer_params
        ours = parameters.get("strongroom") if isinstance(parameters, dict) else None
        grant = ours.get("grant") if isinstance(ours, dict) else None
        if not isinstance(grant, str) or not grant:
            return None
        reason = self._not_cacheable(request)
        if reason is not None:
            if reason not in self._told:
                self._told.add(reason)
                _log.warning("requests with %s are not cached", reason)
            return None
        return Ask(grant, request.cache_salt or "", pack_tokens(request.prompt_token_ids))

    @staticmethod
    def _not_cacheable(request: Any) -> str | None:
        """Why this request's KV is not of its token ids and the measured files alone."""
        sampling = request.sampling_params
        if request.prompt_token_ids is None or request.prompt_embeds is not None:
            return "prompt embeddings"
        if request.mm_features:
            return "multimodal inputs"
        if request.lora_request is not None:
            return "an adapter (LoRA), which this engine's adapter cannot measure yet,"
        if sampling is None:
            return "pooling"
        if sampling.prompt_logprobs is not None:
            return "prompt logprobs"
        if request.resumable:
            return "streamed input"
        return None

    def _measure(self, lookups: Lookups, scheduler_output: Any) -> None:
        """For the report: what this step computes, and who waits."""
        try:
            scheduled = scheduler_output.num_scheduled_tokens
            prompt_tokens = 0
            for key, tokens in scheduled.items():
                request = self._requests.get(key)
                if request is not None:
                    left = request.num_prompt_tokens - request.num_computed_tokens
                    prompt_tokens += max(0, min(tokens, left))
            self._meter.stepped(
                tokens=scheduler_output.total_num_scheduled_tokens,
                prompt_tokens=prompt_tokens,
                running=len(scheduled),
                waiting=max(0, len(self._requests) - len(scheduled)),
                loading=not scheduled and lookups.loading,
            )
        except Exception:  # noqa: BLE001 - a report is worth no request's cache
            _log.exception("a step could not be measured")

    def _skip(self, keys: Iterable[str]) -> None:
        for key in keys:
            request = self._requests.get(key)
            if request is not None:
                request.skip_reading_prefix_cache = True

    def _orders(self) -> StepOrders:
        metadata = self._connector_metadata
        return metadata.orders if isinstance(metadata, StrongroomMetadata) else StepOrders()


def _pages_of(state: Any, key: str) -> list[int]:
    pages: list[int] = state.resolve_block_ids(key)[0]
    return pages


def _all_failed(orders: Iterable[LoadOrder], held: Iterable[str]) -> Report:
    keys = frozenset(order.key for order in orders)
    return Report(sent=frozenset(held), received=keys, failed=keys)


def _adopt_logging() -> None:
    """Let vLLM's handlers show this package's messages; it installs none of its own."""
    ours = logging.getLogger("strongroom")
    if not ours.handlers and not logging.getLogger().handlers:
        ours.parent = logging.getLogger("vllm")
