"""Quantization-aware training and distillation in transformers' Trainer."""

import copy
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM, Trainer, TrainingArguments

from hf_quant import convert_qat_, prepare_qat_, quantize_
from hf_quant.integrations.training import DistillTrainer, QATCallback, output_head, trainer_optimizer
from hf_quant.training import QatModule, distillation_loss
from integration_tests.support.tiny_models import VOCAB, build


IDS = torch.randint(3, VOCAB, (16, 24), generator=torch.Generator().manual_seed(4))
# Some tokens of each row do not count, of each another number.
LABELS = torch.where(torch.arange(24) < torch.arange(16).unsqueeze(1), -100, IDS)
DATA = [{"input_ids": ids, "labels": labels} for ids, labels in zip(IDS, LABELS)]


def arguments(directory: Path, **fields) -> TrainingArguments:
    settings = {"max_steps": 4, "save_steps": 2, "per_device_train_batch_size": 2, "learning_rate": 1e-3}
    settings |= {"report_to": [], "use_cpu": True, "disable_tqdm": True, "logging_steps": 1, "weight_decay": 0.0}
    return TrainingArguments(output_dir=str(directory), **{**settings, **fields})


def distiller(
    model: nn.Module, directory: Path, *, start_step: int | None = 0, teacher: nn.Module | None = None, **fields
) -> DistillTrainer:
    args = arguments(directory, **fields)
    return DistillTrainer(
        model,
        args,
        teacher=build("llama", torch.float32) if teacher is None else teacher,
        train_dataset=DATA,
        eval_dataset=DATA[:2],
        callbacks=None if start_step is None else [QATCallback(start_step)],
        optimizer_cls_and_kwargs=trainer_optimizer("int8" if teacher is None else "fp32", args),
    )


def prepared(fields="int4") -> nn.Module:
    model = build("llama", torch.float32)
    prepare_qat_(model, fields)
    return model


def losses(of: Trainer) -> list[float]:
    return [entry["loss"] for entry in of.state.log_history if "loss" in entry]


def kl(model: nn.Module, teacher: nn.Module) -> float:
    with torch.no_grad():
        student, target = (m.eval()(input_ids=IDS).logits.log_softmax(-1) for m in (model, teacher))
    return nn.functional.kl_div(student, target, log_target=True, reduction="sum").item() / IDS.numel()


def test_distillation_brings_a_model_nearer_to_its_teacher(tmp_path):
    teacher = build("llama", torch.float32)
    model = prepared("int2")
    start = kl(model, teacher)
    assert start == pytest.approx(kl(quantize_(build("llama", torch.float32), "int2"), teacher), rel=1e-3)
    training = distiller(model, tmp_path, max_steps=40)
    training.train()
    assert losses(training)[0] > 1.5 * losses(training)[-1]
    convert_qat_(model)
    assert kl(model, teacher) < 0.6 * start
    model.save_pretrained(tmp_path / "out")
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(reloaded(IDS).logits, model(IDS).logits)


def test_it_resumes_to_the_bit(tmp_path):
    whole = distiller(prepared("W4A8"), tmp_path / "whole")
    whole.train()
    resumed = distiller(prepared("W4A8"), tmp_path / "resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert losses(resumed) == losses(whole) and len(losses(whole)) == 4
    assert all(map(torch.equal, resumed.model.parameters(), whole.model.parameters()))
    assert whole.model.model.layers[0].mlp.up_proj.qat_log_scale.any()
    parameters = whole.model.state_dict(), convert_qat_(resumed.model).state_dict()
    assert any("qat" in name for name in parameters[0]) and not any("qat" in name for name in parameters[1])


def test_batches_of_one_step_give_the_gradients_of_a_large_one(tmp_path):
    """1 x 8 = 8 x 1, with another number of tokens in each row, to 1e-5."""
    found = []
    for size in (8, 1):
        model = prepared()
        training = distiller(
            model,
            tmp_path,
            max_steps=1,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=8 // size,
            learning_rate=1e-2,
            max_grad_norm=0.0,
        )
        training.optimizer_cls_and_kwargs = torch.optim.SGD, {"lr": 1.0}
        training.train()
        found.append((losses(training)[0], [p.detach().clone() for p in model.parameters() if p.requires_grad]))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    start = [p for p in prepared().parameters() if p.requires_grad]
    for a, b, before in zip(found[0][1], found[1][1], start):
        assert (a - b).norm() <= 1e-5 * (a - before).norm() + 1e-7
    assert not torch.equal(found[0][1][0], start[0])


def test_a_start_in_16_bit(tmp_path):
    """Until then it is training in 16 bit, to the bit; codes are chosen for the weights of that step."""
    teacher = build("llama", torch.float32)
    with torch.no_grad():
        teacher.lm_head.weight.mul_(1.5)
    options = {"teacher": teacher, "lr_scheduler_type": "constant"}
    plain = distiller(build("llama", torch.float32), tmp_path, start_step=None, max_steps=3, **options)
    plain.train()
    expected = quantize_(copy.deepcopy(plain.model), "int4")
    model = prepared()
    training = distiller(model, tmp_path, start_step=3, **options)
    callback = next(c for c in training.callback_handler.callbacks if isinstance(c, QATCallback))
    seen = []
    begin = callback.on_step_begin

    def on_step_begin(*positional, **named):
        begin(*positional, **named)
        layers = [module for module in model.modules() if isinstance(module, QatModule)]
        seen.append(({layer.qat.is_on for layer in layers}, layers[0].pack("weight").qdata))

    callback.on_step_begin = on_step_begin
    training.train()
    assert losses(training)[:3] == losses(plain) and losses(plain)[2] < losses(plain)[0]
    assert [on for on, _ in seen] == [{False}, {False}, {False}, {True}]
    assert torch.equal(seen[3][1], expected.model.layers[0].self_attn.q_proj.qdata)


def test_a_run_that_was_saved_at_the_start_step_resumes_to_the_bit(tmp_path):
    """The codes of a checkpoint of that step are those of `prepare_qat_`: the new ones have yet to be chosen."""
    whole = distiller(prepared(), tmp_path, start_step=2)
    whole.train()
    resumed = distiller(prepared(), tmp_path, start_step=2)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    expected = whole.model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in resumed.model.state_dict().items())


@pytest.mark.parametrize(("start_step", "fields"), [(9, {}), (2, {"load_best_model_at_end": True})])
def test_a_run_that_ends_with_weights_of_a_16_bit_step_has_codes_of_these(tmp_path, start_step, fields):
    """Before, they had the scales of the weights before training."""
    model = prepared("int2")
    fields = fields and {**fields, "eval_strategy": "steps", "eval_steps": 2, "greater_is_better": False}
    training = distiller(model, tmp_path, start_step=start_step, learning_rate=1e-2, **fields)
    if fields:
        training.evaluate = lambda *_, **__: {"eval_loss": training.state.global_step}
    training.train()
    saved = load_file(tmp_path / f"checkpoint-{2 if fields else 4}" / "model.safetensors")
    plain = build("llama", torch.float32)
    plain.load_state_dict(saved, strict=False)
    expected, found = quantize_(plain, "int2").state_dict(), convert_qat_(model).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in found.items() if "qdata" in name)


def test_an_adapter_in_trainer(tmp_path):
    model = get_peft_model(build("llama", torch.float32), LoraConfig(r=4, target_modules="all-linear"))
    prepare_qat_(model, "int2")
    training = distiller(model, tmp_path, max_steps=20, learning_rate=1e-2)
    training.train()
    assert losses(training)[-1] < losses(training)[0]
    merged = convert_qat_(model.merge_and_unload())
    assert kl(merged, build("llama", torch.float32)) < kl(
        quantize_(build("llama", torch.float32), "int2"), build("llama", torch.float32)
    )


def test_training_of_an_adapter_resumes_to_the_bit(tmp_path):
    """Trainer saves the adapter alone: the weight under it and its scales are those that prepare_qat_ makes again."""

    def adapted() -> nn.Module:
        torch.manual_seed(0)
        model = get_peft_model(build("llama", torch.float32), LoraConfig(r=4, target_modules="all-linear"))
        prepare_qat_(model, "int3")
        return model

    whole = distiller(adapted(), tmp_path / "whole")
    whole.train()
    resumed = distiller(adapted(), tmp_path / "resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert losses(resumed) == losses(whole) and len(set(losses(whole))) == 4
    start = {name: p for name, p in adapted().named_parameters() if p.requires_grad}
    trained = dict(whole.model.named_parameters())
    assert start and not any(torch.equal(p, trained[name]) for name, p in start.items())
    first, second = (convert_qat_(of.model.merge_and_unload()).state_dict() for of in (whole, resumed))
    assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def test_evaluation_gives_the_loss_and_the_logits(tmp_path):
    training = distiller(prepared(), tmp_path)
    found = training.predict(DATA[:4])
    assert found.predictions.shape == (4, 24, VOCAB)
    model, teacher = training.model, training.teacher
    hidden = [m(IDS[:4], output_hidden_states=True).hidden_states[-1][:, :-1] for m in (model, teacher)]
    expected = distillation_loss(*hidden, model.lm_head, teacher.lm_head, mask=LABELS[:4, 1:] != -100)
    assert found.metrics["test_loss"] == pytest.approx(expected.item(), rel=0.1)


def test_evaluation_without_labels_gives_the_loss_of_all_tokens(tmp_path):
    training = distiller(prepared(), tmp_path)
    unlabelled = [{"input_ids": ids, "attention_mask": ids.new_ones(24)} for ids in IDS[:4]]
    unlabelled[0]["attention_mask"][20:] = 0
    labelled = [{**row, "labels": torch.where(row["attention_mask"] == 0, -100, 0)} for row in unlabelled]
    found, expected = training.predict(unlabelled), training.predict(labelled)
    assert found.metrics["test_loss"] == pytest.approx(expected.metrics["test_loss"], rel=1e-6) and not found.label_ids
    assert training.evaluate(unlabelled)["eval_loss"] == found.metrics["test_loss"] > 0
    assert (found.predictions == expected.predictions).all()


def test_embeddings_in_the_place_of_tokens(tmp_path):
    """Without labels and without a mask all positions count."""
    training = distiller(prepared(), tmp_path)
    table = build("llama", torch.float32).get_input_embeddings().weight.detach()
    found = training.evaluate([{"inputs_embeds": table[ids]} for ids in IDS[:4]])["eval_loss"]
    expected = training.evaluate([{"input_ids": ids, "labels": ids} for ids in IDS[:4]])["eval_loss"]
    assert found == pytest.approx(expected, rel=1e-4)


def test_learned_prompts_are_no_tokens_of_the_batch(tmp_path):
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    model = get_peft_model(quantize_(build("llama", torch.float32), "int2"), config)
    training = distiller(model, tmp_path, start_step=None)
    found = training.evaluate(DATA[:4])["eval_loss"]
    with torch.no_grad():
        student, target = (m(input_ids=IDS[:4]).logits[:, -24:-1].log_softmax(-1) for m in (model, training.teacher))
    terms = nn.functional.kl_div(student, target, log_target=True, reduction="none").sum(-1)
    assert found == pytest.approx(terms[LABELS[:4, 1:] != -100].mean().item(), rel=1e-4)
    training.train()
    assert len(losses(training)) == 4


def test_the_loss_is_divided_by_the_tokens_that_are_predicted(tmp_path):
    """Trainer counts the first token, too, where the class of a model is not named ...ForCausalLM."""
    model, teacher = build("gpt2", torch.float32), build("gpt2", torch.float32, seed=1)
    training = distiller(model, tmp_path, start_step=None, teacher=teacher)
    found = training.evaluate([{"input_ids": ids, "labels": ids} for ids in IDS[:4]])["eval_loss"]
    with torch.no_grad():
        student, target = (m(IDS[:4]).logits[:, :-1].flatten(0, 1).log_softmax(-1) for m in (model, teacher))
    expected = nn.functional.kl_div(student, target, log_target=True, reduction="batchmean")
    assert found == pytest.approx(expected.item(), rel=1e-4)


def softcapped() -> Gemma2ForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 4, "head_dim": 16, "vocab_size": VOCAB, "final_logit_softcapping": 0.05}
    return Gemma2ForCausalLM(Gemma2Config(**sizes)).eval()


def test_softcapping_and_factors_are_those_of_the_model(tmp_path):
    model = softcapped()
    out = model(IDS[:2], output_hidden_states=True)
    torch.testing.assert_close(output_head(model)(out.hidden_states[-1]), out.logits)
    assert not torch.allclose(model.lm_head(out.hidden_states[-1]), out.logits, atol=1e-3)
    with pytest.raises(ValueError, match="no output embeddings"):
        output_head(build("llama_classifier"))

    class Odd(type(build("llama"))):
        def forward(self, input_ids=None, labels=None, **kwargs):
            out = super().forward(input_ids, **kwargs)
            out.logits = out.logits * 2
            return out

    odd = prepared()
    odd.__class__ = Odd
    with pytest.raises(ValueError, match="the logits of a Odd are not those of its output embeddings"):
        distiller(odd, tmp_path).train()


def test_refusals(tmp_path):
    with pytest.raises(ValueError, match="start_step is -1"):
        QATCallback(-1)
    with pytest.raises(ValueError, match="no layer of the model is prepared"):
        distiller(build("llama", torch.float32), tmp_path).train()
    model = build("llama", torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepare_qat_(model, "int4")
    late = DistillTrainer(
        model,
        arguments(tmp_path),
        teacher=build("llama"),
        train_dataset=DATA,
        eval_dataset=DATA[:2],
        callbacks=[QATCallback()],
        optimizers=(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer)),
    )
    with pytest.raises(ValueError, match="the optimizer lacks the learned scales"):
        late.train()
    with pytest.raises(ValueError, match="the teacher is the model that is trained"):
        DistillTrainer(model, arguments(tmp_path), teacher=model, train_dataset=DATA)
    with pytest.raises(ValueError, match="teacher is a str; needs a torch.nn.Module"):
        DistillTrainer(model, arguments(tmp_path), teacher="llama", train_dataset=DATA)
    with pytest.raises(ValueError, match="has an encoder beside its decoder"):
        DistillTrainer(build("t5"), arguments(tmp_path), teacher=build("t5"), train_dataset=DATA)
    with pytest.raises(ValueError, match="label_smoothing_factor has no effect"):
        distiller(model, tmp_path, label_smoothing_factor=0.1)
    with pytest.raises(ValueError, match="compute_loss_func has no effect"):
        options = {"teacher": build("llama"), "train_dataset": DATA, "compute_loss_func": lambda *_: None}
        DistillTrainer(model, arguments(tmp_path), **options)
