"""The machine around the analyses: models, recording, corpora, reports and the command line."""
