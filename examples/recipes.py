"""Modules to copy whose loss is not a mean over labels, each with its strategy; docs/recipes.md.

    trainer = L.Trainer(strategy=Preferences.make_strategy(), devices=2)

`tests/test_recipes.py` trains each of them on two ranks with unequal batches, and compares its weights with those of
one process.
"""

import lightning as L  # noqa: N812
import torch
import torch.nn.functional as F  # noqa: N812

from lightning_automodel import AutomodelStrategy


class Preferences(L.LightningModule):
    """DPO: the loss is a mean over pairs, whatever their number of tokens."""

    @staticmethod
    def make_strategy():
        return AutomodelStrategy(count="samples")

    def __init__(self, policy, reference, beta=0.1):
        super().__init__()
        self.policy, self.reference, self.beta = policy, reference.requires_grad_(False), beta

    def log_probs(self, model, ids, is_answer):
        logits = model(ids)[:, :-1]  # [2 b, s - 1, v]
        chosen = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        return (
            (chosen * is_answer[:, 1:]).sum(-1).chunk(2)
        )  # of the better and of the worse answers, [b] each

    def training_step(self, batch, batch_idx):
        ids = torch.cat([batch["better"], batch["worse"]])  # [2 b, s]
        is_answer = torch.cat([batch["better_is_answer"], batch["worse_is_answer"]])
        better, worse = self.log_probs(self.policy, ids, is_answer)
        with torch.no_grad():
            better_before, worse_before = self.log_probs(self.reference, ids, is_answer)
        return -F.logsigmoid(self.beta * (better - better_before - worse + worse_before)).mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.policy.parameters(), lr=1e-5)


class Reward(L.LightningModule):
    """A reward model: a mean over pairs."""

    @staticmethod
    def make_strategy():
        return AutomodelStrategy(count="samples")

    def __init__(self, model):
        super().__init__()
        self.model = model  # ids [b, s] to a reward [b]

    def training_step(self, batch, batch_idx):
        better, worse = self.model(torch.cat([batch["better"], batch["worse"]])).chunk(2)
        return -F.logsigmoid(better - worse).mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-5)


class Student(L.LightningModule):
    """Distillation: both parts are means over the same label tokens, so together they are one token loss."""

    @staticmethod
    def make_strategy():
        return AutomodelStrategy()

    def __init__(self, student, teacher, share=0.5, temperature=2.0):
        super().__init__()
        self.student, self.teacher = student, teacher.requires_grad_(False)
        self.share, self.temperature = share, temperature

    def training_step(self, batch, batch_idx):
        labels = batch["labels"].flatten()
        is_label = labels != -100
        n = is_label.sum()
        logits = self.student(batch["input_ids"]).flatten(0, 1)  # [b * s, v]
        with torch.no_grad():
            wanted = self.teacher(batch["input_ids"]).flatten(0, 1)
        own, wanted = ((x[is_label] / self.temperature).log_softmax(-1) for x in (logits, wanted))
        divergence = F.kl_div(own, wanted, reduction="sum", log_target=True) * self.temperature**2
        loss = F.cross_entropy(logits, labels, reduction="sum")
        return {"loss": torch.lerp(loss, divergence, self.share) / n.clamp(min=1), "num_label_tokens": n}

    def configure_optimizers(self):
        return torch.optim.AdamW(self.student.parameters(), lr=1e-4)


class SoftLabels(L.LightningModule):
    """Soft labels, of mixup or CutMix: a mean over samples, also with class weights."""

    @staticmethod
    def make_strategy():
        return AutomodelStrategy(count="samples")

    def __init__(self, model, class_weights=None):
        super().__init__()
        self.model = model
        self.register_buffer("class_weights", class_weights)

    def training_step(self, batch, batch_idx):
        logits, soft = self.model(batch["image"]), batch["soft"]  # [b, classes] both
        return F.cross_entropy(logits, soft, weight=self.class_weights, label_smoothing=0.1)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Segmentation(L.LightningModule):
    """Segmentation: the labels are another entry of the batch, with another ignored value."""

    @staticmethod
    def make_strategy():
        return AutomodelStrategy(label_key="mask", ignore_index=255)

    def __init__(self, model):
        super().__init__()
        self.model = model  # images [b, 3, h, w] to logits [b, classes, h, w]

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.model(batch["image"]), batch["mask"], ignore_index=255)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Detector(L.LightningModule):
    """Detection: sums over boxes, divided by the number of boxes of this batch, which is the count."""

    @staticmethod
    def make_strategy():
        return AutomodelStrategy()

    def __init__(self, model):
        super().__init__()
        self.model = model  # image [3, h, w] to one box for each of its targets, [n, 4]

    def training_step(self, batch, batch_idx):
        images, targets = batch
        pairs = zip(images, targets, strict=True)
        total = sum(F.l1_loss(self.model(image, target), target, reduction="sum") for image, target in pairs)
        n = sum(len(target) for target in targets)
        return {"loss": total / max(n, 1), "num_label_tokens": n}

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Graphs(L.LightningModule):
    """Graphs: a batch has as many rows as nodes, and the loss is a mean over graphs."""

    @staticmethod
    def make_strategy():
        return AutomodelStrategy(count_label_tokens=lambda batch: len(batch["y"]))  # PyG: batch.num_graphs

    def __init__(self, width, hidden):
        super().__init__()
        self.node, self.head = torch.nn.Linear(width, hidden), torch.nn.Linear(hidden, 1)

    def training_step(self, batch, batch_idx):
        nodes = self.node(batch["x"]).tanh()  # [nodes, hidden]
        graphs = nodes.new_zeros(len(batch["y"]), nodes.shape[1]).index_add(0, batch["batch"], nodes)
        return F.mse_loss(self.head(graphs).squeeze(-1), batch["y"])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Potential(L.LightningModule):
    """Energies are means over graphs, forces over atoms: each sum is divided by its mean count over the ranks."""

    @staticmethod
    def make_strategy():
        return AutomodelStrategy(per_token_loss=False)  # with accumulate_grad_batches=1

    def __init__(self, width, hidden):
        super().__init__()
        self.atom = torch.nn.Linear(width, hidden)
        self.energy, self.force = torch.nn.Linear(hidden, 1), torch.nn.Linear(hidden, 3)

    def training_step(self, batch, batch_idx):
        atoms = self.atom(batch["x"]).tanh()  # [atoms, hidden]
        graphs = atoms.new_zeros(len(batch["y"]), atoms.shape[1]).index_add(0, batch["batch"], atoms)
        energy = (self.energy(graphs).squeeze(-1) - batch["y"]).square().sum()
        force = (self.force(atoms) - batch["force"]).square().sum()
        counts = energy.new_tensor([len(graphs), len(atoms)])
        num_graphs, num_atoms = self.trainer.strategy.reduce(counts, reduce_op="mean")  # every rank calls it
        return energy / num_graphs + 10 * force / num_atoms

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class PotentialByGraph(L.LightningModule):
    """The same with accumulation: forces are divided by the mean number of atoms of a graph in the data."""

    @staticmethod
    def make_strategy():
        return AutomodelStrategy()

    def __init__(self, width, hidden, atoms_of_a_graph):
        super().__init__()
        self.atom, self.atoms_of_a_graph = torch.nn.Linear(width, hidden), atoms_of_a_graph
        self.energy, self.force = torch.nn.Linear(hidden, 1), torch.nn.Linear(hidden, 3)

    def training_step(self, batch, batch_idx):
        atoms = self.atom(batch["x"]).tanh()  # [atoms, hidden]
        graphs = atoms.new_zeros(len(batch["y"]), atoms.shape[1]).index_add(0, batch["batch"], atoms)
        energy = (self.energy(graphs).squeeze(-1) - batch["y"]).square().sum()
        force = (self.force(atoms) - batch["force"]).square().sum() / self.atoms_of_a_graph
        return {"loss": (energy + 10 * force) / len(graphs), "num_label_tokens": len(graphs)}

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class ActorCritic(L.LightningModule):
    """PPO: each optimizer steps after its own backward."""

    @staticmethod
    def make_strategy():
        return AutomodelStrategy()  # with DDP: ddp_kwargs={"find_unused_parameters": True}

    def __init__(self, actor, critic):
        super().__init__()
        self.automatic_optimization = False
        self.actor, self.critic = actor, critic

    def training_step(self, batch, batch_idx):
        chosen = self.actor(batch["state"]).log_softmax(-1).gather(-1, batch["action"][:, None]).squeeze(-1)
        ratio, advantage = (chosen - batch["log_prob"]).exp(), batch["advantage"]
        actor_loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        critic_loss = F.mse_loss(self.critic(batch["state"]).squeeze(-1), batch["return"])
        for optimizer, loss in zip(self.optimizers(), (actor_loss, critic_loss), strict=True):
            optimizer.zero_grad()
            self.manual_backward(loss, num_label_tokens=len(chosen))
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.AdamW(part.parameters(), lr=3e-4) for part in (self.actor, self.critic)]


class Truncated(L.LightningModule):
    """Truncated backpropagation through time: each chunk has its own count and its own step."""

    @staticmethod
    def make_strategy():
        return AutomodelStrategy()

    def __init__(self, vocabulary, width, chunk=32):
        super().__init__()
        self.automatic_optimization = False
        self.embedding, self.chunk = torch.nn.Embedding(vocabulary, width), chunk
        self.rnn, self.head = (
            torch.nn.GRU(width, width, batch_first=True),
            torch.nn.Linear(width, vocabulary),
        )

    def training_step(self, batch, batch_idx):
        optimizer, state = self.optimizers(), None
        for ids, labels in zip(
            batch["input_ids"].split(self.chunk, 1), batch["labels"].split(self.chunk, 1), strict=True
        ):
            hidden, state = self.rnn(self.embedding(ids), state)
            state = state.detach()
            n = (labels != -100).sum()
            loss = F.cross_entropy(
                self.head(hidden).flatten(0, 1), labels.flatten(), reduction="sum"
            ) / n.clamp(min=1)
            self.manual_backward(loss, num_label_tokens=n)
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class ByMuon(L.LightningModule):
    """Muon for the matrices, AdamW for the rest, under manual optimization."""

    @staticmethod
    def make_strategy():
        return AutomodelStrategy()

    def __init__(self, model):
        super().__init__()
        self.automatic_optimization = False
        self.model = model  # with `embedding`, `blocks` and `head`

    def training_step(self, batch, batch_idx):
        n = (batch["labels"] != -100).sum()
        logits = self.model(batch["input_ids"])
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum") / n.clamp(
            min=1
        )
        self.manual_backward(loss, num_label_tokens=n)
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self):
        matrices = [p for p in self.model.blocks.parameters() if p.ndim == 2]
        of_muon = set(matrices)
        others = [p for p in self.model.parameters() if p not in of_muon]
        return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=3e-4)]
