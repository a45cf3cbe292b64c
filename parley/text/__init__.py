"""Text to tokens and back: tokeniser, chat template, detokeniser, stop strings. Runs in the API process, without torch."""
