"""Text to tokens and back: tokeniser, chat template, detokeniser, stop strings. No torch here."""
