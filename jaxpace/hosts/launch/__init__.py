"""Starts the processes of a job on one machine and answers for them: one log each, one fate, no
orphans."""
