"""A stopped fit resumes as if it had never stopped: random states, loaders, running metrics, loops."""
