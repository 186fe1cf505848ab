# %% [markdown]
# Training on several ranks from a notebook. Each `# %%` begins a cell, in Jupyter with jupytext and in
# editors that know such cells; `python examples/notebook.py` runs them all.
#
# A notebook cannot be started a second time, so ranks are forked: they have what the cells above have made.
# Before `fit` nothing may touch a GPU: no `.cuda()`, no tensor on a device.

# %%
import lightning as L
import torch

import lightning_dp  # noqa: F401  (registers the strategy's names)
from lightning_dp.demos.digits import DigitsDataModule, DigitsModule

# %%
L.seed_everything(42)
module, data = DigitsModule(), DigitsDataModule()
trainer = L.Trainer(
    strategy="lean_ddp_notebook",
    accelerator="cpu",
    devices=2,
    max_epochs=5,
    logger=False,
    enable_checkpointing=False,
)

# %% [markdown]
# The weights come back from rank 0 into this process, as do `callback_metrics`.

# %%
trainer.fit(module, data)
print({name: round(float(value), 3) for name, value in trainer.callback_metrics.items()})

# %% [markdown]
# Two ranks are gone again; the module is an ordinary one.

# %%
data.setup("fit")
module.eval()
x, y = next(iter(data.val_dataloader()))
with torch.no_grad():
    print("right:", int((module(x).argmax(dim=-1) == y).sum()), "of", len(y))

# %% [markdown]
# Another fit forks new ranks: change what you like and run it again.

# %%
trainer = L.Trainer(
    strategy="lean_ddp_notebook",
    accelerator="cpu",
    devices=2,
    max_epochs=1,
    logger=False,
    enable_checkpointing=False,
)
trainer.fit(module, data)
