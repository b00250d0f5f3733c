"""Weights in the formats of others: Hugging Face safetensors, torch DCP."""
