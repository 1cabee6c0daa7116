"""What an evaluation asks: definitions of tasks, suites, and the datasets that they read."""
