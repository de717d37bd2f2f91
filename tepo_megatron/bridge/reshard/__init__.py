"""Which rank sends what to whom: a plan that is made, balanced and proved complete before a byte moves; no communication."""
