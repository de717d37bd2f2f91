"""What the model is asked, and how answers are judged."""
