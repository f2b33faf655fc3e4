"""What works: the training jobs that everstep keeps stepping."""
