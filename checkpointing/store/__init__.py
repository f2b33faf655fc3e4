"""Where checkpoints are kept: a folder or S3."""
