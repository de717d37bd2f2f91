"""Names that the rows of metrics.jsonl have, but for those of evaluations."""

import re

_METRICS = """
    canary/cache_gap|drift|max_logprob_gap|mean_logprob_gap|p90_logprob_gap|read_back
    canary/rollouts_max_gap|rollouts_mean_gap|rollouts_worst_group
    clip/bound_high|bound_low|high|length|low|share|share_q1|share_q2|share_q3|share_q4|slope_high|slope_low
    distill/agreement|divergence|divergence_q1|divergence_q2|divergence_q3|divergence_q4|mass
    entropy/delta|delta_masked|delta_unmasked|mean|noise/p50|noise/p90|noise/p99
    environment/new_histories|restarts|seconds|tokens|tool_errors|turns ess grad_norm
    groups/carried|carried_in|drawn|dropped|filtered|kept|zero_variance idle/servers|trainer kl/masked|mean|reference log/failed
    loss lost/resume|rollback|server|skipped lr mask/fraction memory/offloaded_gib|peak_gib mismatch/dropped|kl|weight
    moe/aux_loss|load_entropy|max_violation|max_violation/worst|replay_differs
    ratio/max|mean|min|noise/p50|noise/p90|noise/p99|sigma requests/retried response_len/mean|truncated response_tokens
    reward/failed|mean|overlong|std rollback/count sampling/kept_max|kept_mean sequence_ratio/noise/p50|noise/p90|noise/p99
    servers/restarts|timeouts staleness/dropped|max|mean|versions
    time/canary|eval|journal|other|reward|rollout|save_stage|save_waited|save_write|score|step|sync|update tokens/s
    update/skipped weights_version/max|min
"""
TRAINING = {
    f"{head}{slash}{name}"
    for head, slash, names in (item.partition("/") for item in _METRICS.split())
    for name in names.split("|")
}
OF_UPDATES = re.compile(
    r"(clip|distill|entropy|kl|mask|mismatch|ratio|sampling)/(?!noise/).+|reward/(mean|std)|response_len/mean|response_tokens"
    r"|groups/zero_variance|ess|grad_norm|loss|lr|update/skipped"
)
NUMBERED = re.compile(
    r"source/.+/(divergence|reward|share)|groups/filtered/.+|clip/share_u\d+|moe/layer_\d+/.+|staleness/kl_\d+"
)
