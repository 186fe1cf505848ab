"""A sweeper that draws numbers, as Optuna and its like do. Found through PYTHONPATH."""

import random

from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper


class DrawnSweeper(Sweeper):
    """Gives each of a list of jobs a number that no other process could guess."""

    def __init__(self, jobs):
        self.jobs = jobs

    def setup(self, *, hydra_context, task_function, config):
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments):
        results = []
        for index, job in enumerate(self.jobs):
            drawn = [*arguments, *job, f"foo={random.SystemRandom().randint(1, 10**6)}"]
            results += self.launcher.launch([drawn], initial_job_idx=index)
        print("OBJECTIVES", [round(result.return_value) for result in results])
        return
