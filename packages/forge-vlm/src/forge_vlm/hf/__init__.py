"""Conversion between vision-language models and those of Hugging Face."""
