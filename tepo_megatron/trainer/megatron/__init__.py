"""The trainer on Megatron-Core. Beside a benchmark, nothing else imports megatron.core."""
