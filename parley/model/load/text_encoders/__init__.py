"""Loads encoders of text, by family: BERT and its relatives, and the classifier heads above them."""
