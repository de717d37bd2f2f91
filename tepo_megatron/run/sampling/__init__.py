"""Who samples when: schedules, groups, rewards, the journal."""
