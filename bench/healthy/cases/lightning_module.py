"""A LightningModule with a plateau scheduler on validation loss."""
import logging
import tempfile
import warnings

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
import lightning as L


class Classifier(L.LightningModule):
    def __init__(self, hidden=64, lr=2e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Dropout(0.1), nn.Linear(hidden, 10))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, _):
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def validation_step(self, batch, _):
        x, y = batch
        self.log("val_loss", nn.functional.cross_entropy(self(x), y))

    def configure_optimizers(self):
        opt = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        return {"optimizer": opt, "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=2), "monitor": "val_loss"}}


L.seed_everything(0, verbose=False)
X, y = load_digits(return_X_y=True)
ds = TensorDataset(torch.tensor(X / 16, dtype=torch.float32), torch.tensor(y))
train, val = torch.utils.data.random_split(ds, [1400, len(ds) - 1400])
trainer = L.Trainer(max_epochs=4, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
                    default_root_dir=tempfile.mkdtemp())
trainer.fit(Classifier(), DataLoader(train, 64, shuffle=True), DataLoader(val, 200))
print(float(trainer.callback_metrics["val_loss"]))
