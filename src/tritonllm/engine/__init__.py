"""From requests to tokens: sequences, blocks, the scheduler, the runner, and the engine on top."""
