"""What a run needs: memory, traffic, time. docs/reference/plan.md has the formulas. No torch."""

from tepo_megatron.plan.run_plan import Plan, check_exact, check_placement, check_plan, make_plan

__all__ = ["Plan", "check_exact", "check_placement", "check_plan", "make_plan"]
