"""Models and checkpoints in the formats of others: Hugging Face's and NeuronX Distributed's, both ways."""
