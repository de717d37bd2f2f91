"""Memory, traffic and time of a run before a GPU is requested (docs/reference/plan.md). No torch."""

from tepo_megatron.plan.run_plan import Plan, check_exact, check_placement, check_plan, make_plan

__all__ = ["Plan", "check_exact", "check_placement", "check_plan", "make_plan"]
