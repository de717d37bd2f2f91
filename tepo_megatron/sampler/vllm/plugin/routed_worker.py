"""vLLM's worker on a CPU that returns the experts which routers chose, as vLLM's own does on a GPU.

vLLM 0.32 returns them (``--enable-return-routed-experts``) from Model Runner V2 alone, which is made of Triton's kernels; on a
CPU Model Runner V1 runs. This gives V1 the four calls that V2 makes. All else is vLLM's: what is captured in the routers, the
store by blocks of the prefix cache, which has the experts of a prompt that was found there, and the scheduler that sends them.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.config import VllmConfig
from vllm.distributed.aux_output_connector.worker import AuxOutputWorkerConnector, PendingAuxOutput, get_aux_output_connector
from vllm.platforms import current_platform
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.cpu_worker import CPUWorker


class RoutedWorker(CPUWorker):  # type: ignore[misc] # vllm's types are not followed
    """As vLLM's; answers carry the experts where the server is to return them."""

    _connector: AuxOutputWorkerConnector | None = None
    _pending: PendingAuxOutput | None = None

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """As vLLM's, and has the model's routers show their choice."""
        super().initialize_from_config(kv_cache_config)
        if self.vllm_config.aux_output_config.enabled:
            self._connector = get_aux_output_connector(self.model_runner.get_model(), self.vllm_config, kv_cache_config)

    def execute_model(self, scheduler_output: Any) -> Any:
        """As vLLM's, and keeps what the routers chose in this step."""
        connector = self._connector
        if connector is None:
            return super().execute_model(scheduler_output)
        connector.begin_step(scheduler_output.aux_output_connector_metadata)
        output = super().execute_model(scheduler_output)
        if scheduler_output.total_num_scheduled_tokens:
            self._pending = connector.prepare_output(_step_of(self.model_runner))
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        """As vLLM's, with the experts of each request's tokens of this step."""
        output = super().sample_tokens(grammar_output)
        pending, self._pending = self._pending, None
        if pending is not None:
            assert isinstance(output, ModelRunnerOutput)  # vLLM schedules nothing ahead on a CPU
            sampled = np.array([len(tokens) for tokens in output.sampled_token_ids])
            pending.enqueue_cpu_copy(sampled, np.zeros_like(sampled))
            output.aux_output_connector_output = pending.process_output()
        return output

    def shutdown(self) -> None:
        """As vLLM's."""
        if self._connector is not None:
            self._connector.close()
        super().shutdown()


def allow_on_cpu() -> None:
    """From here on vLLM's config lets a server on a CPU return experts. Nothing happens on GPUs, which check it themselves."""
    if current_platform.is_cpu():
        VllmConfig._verify_aux_output_compatibility = lambda _: None


def _step_of(runner: Any) -> SimpleNamespace:
    """Which request has which rows of the step that V1 has just computed, by V2's names."""
    batch = runner.input_batch
    requests = list(batch.req_ids)
    return SimpleNamespace(
        req_ids=requests,
        query_start_loc_np=runner.query_start_loc.np[: len(requests) + 1].copy(),
        num_computed_tokens_np=batch.num_computed_tokens_cpu[: len(requests)].copy(),
    )
