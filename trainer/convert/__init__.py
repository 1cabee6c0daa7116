"""Convert models and checkpoints to and from the formats of Hugging Face and NeuronX Distributed."""
