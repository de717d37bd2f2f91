"""The algorithm as a loop of one's own: the parts of a run, put together by hand.

python examples/own_loop/loop.py [train.steps=10 …]
"""

import sys
import warnings
from collections.abc import Sequence

import torch

import tepo_megatron
from tepo_megatron.core.problem import ResponseText
from tepo_megatron.core.rollout import Rollout
from tepo_megatron.run.step.minibatches import derive_seed, minibatches
from tepo_megatron.run.weights import WeightPublisher
from tepo_megatron.sampler.fleet.fleet import Fleet
from tepo_megatron.tasks.data.builtin import resolve_model_path
from tepo_megatron.tasks.data.problems import encode_prompt, load_problems
from tepo_megatron.tasks.data.sources import ProblemSampler
from tepo_megatron.tasks.data.tokenizer import load_tokenizer
from tepo_megatron.tasks.evaluate.evaluation import evaluate_all
from tepo_megatron.tasks.reward.pool import RewardPool
from tepo_megatron.trainer.megatron.engine import Engine


class Sampler:
    """Problems, the vLLM servers that answer them, and the verifiers that rate the answers."""

    def __init__(self, config: tepo_megatron.RunConfig, servers: Fleet, verifiers: RewardPool) -> None:
        self.config, self.servers, self.verifiers = config, servers, verifiers
        self.tokenizer = load_tokenizer(resolve_model_path(config.model.path))
        self.problems = ProblemSampler(load_problems("builtin:addition"), config.seed)
        self.heldout = load_problems("builtin:addition-heldout")

    def rollouts(self, step: int) -> list[Rollout]:
        """The responses to a step's problems, with their rewards; those that could not be scored are left out."""
        config, problems = self.config, self.problems.next(self.config.rollout.prompts_per_step)
        prompts = [encode_prompt(self.tokenizer, problem) for problem in problems]
        groups = self.servers.generate(
            prompts,
            n=config.rollout.samples_per_prompt,
            temperature=config.rollout.sampling.temperature,
            max_new_tokens=config.rollout.sampling.max_new_tokens,
            seed=derive_seed(config.seed, step, "rollout"),
        )
        drawn = [(group, response) for group, responses in enumerate(groups) for response in responses]
        texts = [ResponseText(self.tokenizer.decode(response.response_ids.tolist())) for _, response in drawn]
        rewards = self.verifiers.score([(problems[group], text) for (group, _), text in zip(drawn, texts, strict=True)])
        return [
            Rollout.of(
                response, problem_id=problems[group].id, group=group, prompt_ids=prompts[group], text=text, reward=scored.reward
            )
            for (group, response), text, scored in zip(drawn, texts, rewards, strict=True)
            if scored.reward is not None
        ]

    def accuracy(self) -> float:
        """The share of held-out problems that are solved greedily."""
        result = evaluate_all(
            self.config,
            self.heldout,
            (),
            generate=self.servers.generate,
            generate_heldout=self.servers.generate,
            tokenizer=self.tokenizer,
            pools={None: self.verifiers},
            seed=lambda _purpose: self.config.seed,
        )
        return result.metrics["accuracy/greedy"]


def main(overrides: Sequence[str]) -> None:
    warnings.filterwarnings("ignore", module=r"megatron\.")  # of what is missing on a CPU
    config = tepo_megatron.load_run("examples/own_loop/run.yaml", overrides)
    config = config.with_dtype(config.dtype(torch.cuda.device_count()))
    model = resolve_model_path(config.model.path)
    servers = Fleet(
        config.rollout.server,
        model_dir=model,
        dtype=config.model.dtype,
        stop_token_ids=load_tokenizer(model).eos_ids,
        log_dir=config.output / "logs",
        trained=True,
    )
    with RewardPool(config.reward) as verifiers, servers:
        sampler = Sampler(config, servers, verifiers)
        engine = Engine(config, model)
        publisher = WeightPublisher(config, engine.weights, servers)
        publisher.update_weights(engine.weights.version(0))
        print(f"before the first step: held out {sampler.accuracy():.3f}", flush=True)
        for step in range(config.train.steps):
            rollouts = sampler.rollouts(step)
            batch = engine.batch_from_root(rollouts)  # packed, with advantages
            if config.engine.noise_every and step % config.engine.noise_every == 0:
                engine.measure_noise(batch)  # below it TEPO's mask takes no entropy for falling
            parts = minibatches(batch, config.train.minibatches, seed=config.seed, step=step)
            scored = [engine.score(part) for part in parts]  # log-probs and entropies before the updates
            passes = scored * config.train.epochs_per_batch
            for number, part in enumerate(passes, start=1):
                engine.update(part, last=number == len(passes))
            publisher.update_weights(engine.weights.version(step + 1))
            mean = sum(rollout.reward or 0.0 for rollout in rollouts) / len(rollouts)
            due = (step + 1) % config.evaluate.every == 0
            print(f"step {step + 1}: reward {mean:.3f}" + (f", held out {sampler.accuracy():.3f}" if due else ""), flush=True)
        engine.weights.export(config.output / "model")
        engine.close()


if __name__ == "__main__":
    main(sys.argv[1:])
