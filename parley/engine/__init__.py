"""Engines turn token work into token output. ``protocol`` says what one is; the other files are the kinds there are."""
