import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm import envs
from vllm.distributed.aux_output_connector.worker import AuxOutputWorkerConnector, PendingAuxOutput, get_aux_output_connector
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.cpu_worker import CPUWorker

from tepo_megatron.sampler.vllm.plugin.patches import take_cores
from tepo_megatron.sampler.vllm.wire import FORK_VARIABLE


class Worker(CPUWorker):  # type: ignore[misc] # vllm's types are not followed
    """Returns experts on CPUs, where vLLM 0.32 does not (Model Runner V2 needs Triton).

    A fork binds to its cores: OpenMP reads ``VLLM_CPU_OMP_THREADS_BIND`` once, before the fork.
    """

    _connector: AuxOutputWorkerConnector | None = None
    _pending: PendingAuxOutput | None = None

    def __init__(self, vllm_config: Any, local_rank: int, *args: Any, **kwargs: Any) -> None:
        if os.environ.get(FORK_VARIABLE):
            torch.set_num_threads(take_cores(envs.VLLM_CPU_OMP_THREADS_BIND, local_rank))
        super().__init__(vllm_config, local_rank, *args, **kwargs)

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        super().initialize_from_config(kv_cache_config)
        if self.vllm_config.aux_output_config.enabled:
            self._connector = get_aux_output_connector(self.model_runner.get_model(), self.vllm_config, kv_cache_config)

    def execute_model(self, scheduler_output: Any) -> Any:
        connector = self._connector
        if connector is None:
            return super().execute_model(scheduler_output)
        connector.begin_step(scheduler_output.aux_output_connector_metadata)
        output = super().execute_model(scheduler_output)
        if scheduler_output.total_num_scheduled_tokens:
            self._pending = connector.prepare_output(_step_of(self.model_runner))
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        output = super().sample_tokens(grammar_output)
        pending, self._pending = self._pending, None
        if pending is not None:
            assert isinstance(output, ModelRunnerOutput)  # vLLM schedules nothing ahead on a CPU
            sampled = np.array([len(tokens) for tokens in output.sampled_token_ids])
            pending.enqueue_cpu_copy(sampled, np.zeros_like(sampled))
            output.aux_output_connector_output = pending.process_output()
        return output

    def shutdown(self) -> None:
        if self._connector is not None:
            self._connector.close()
        super().shutdown()


def _step_of(runner: Any) -> SimpleNamespace:
    batch = runner.input_batch
    requests = list(batch.req_ids)
    return SimpleNamespace(
        req_ids=requests,
        query_start_loc_np=runner.query_start_loc.np[: len(requests) + 1].copy(),
        num_computed_tokens_np=batch.num_computed_tokens_cpu[: len(requests)].copy(),
    )
