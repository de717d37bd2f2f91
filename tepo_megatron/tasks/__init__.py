"""What is asked of the model, and how answers are judged."""
