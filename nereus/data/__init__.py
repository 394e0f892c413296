"""Prompts, rewards and tokenizers."""
