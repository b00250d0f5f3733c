"""Vision-language models of Hugging Face, in both directions."""
