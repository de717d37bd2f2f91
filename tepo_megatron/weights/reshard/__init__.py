"""Plans which rank sends what to whom. A plan is made, balanced and proved complete before a byte moves.

Nothing here communicates.
"""
