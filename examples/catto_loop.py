"""The whole method in one flat file: DPO, the paper's calibration term, and the decoupled score on the label.

    python examples/catto_loop.py MODEL preferences.jsonl outcome.jsonl

MODEL is a chat model that was fine-tuned to answer with <think>...</think> and <answer>. Both files are written by
`catto teach`: preference pairs, and unfiltered responses for the score. This file uses plain PyTorch and Transformers,
dense logits and one process. `CATTOTrainer` computes the same losses and supports a fused head, shared prompts, LoRA
and several processes.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.functional import logsigmoid
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

BETA = 0.1  # DPO's beta
CATTO_WEIGHT = 0.1  # lambda of the paper's term
SCORE_WEIGHT = 1.0  # weight of the score on the label
ANSWER = "<answer>\n"  # the label follows, on a line of its own


@dataclass
class Response:
    """One response as token ids, and the position of its label."""

    ids: torch.Tensor  # (L,): prompt, response, end of sequence
    prompt_length: int
    label_at: int  # index of the label's token in `ids`
    label_ids: list[int]  # the token of every label at that index
    gold: int  # index of the right label


def encode_response(tokenizer, prompt, text, labels, gold) -> Response:
    prompt_text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    prompt_ids = tokenizer(prompt_text, add_special_tokens=False)["input_ids"]
    response_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    before_label = text[: text.rindex(ANSWER) + len(ANSWER)]
    label_at = len(tokenizer(before_label, add_special_tokens=False)["input_ids"])
    label_ids = []
    for label in labels:
        ids = tokenizer(before_label + label, add_special_tokens=False)["input_ids"]
        label_ids.append(ids[label_at])
    return Response(
        ids=torch.tensor(prompt_ids + response_ids + [tokenizer.eos_token_id]),
        prompt_length=len(prompt_ids),
        label_at=len(prompt_ids) + label_at,
        label_ids=label_ids,
        gold=labels.index(gold),
    )


def next_token_logprobs(model, responses: list[Response]) -> torch.Tensor:
    """Return the log-probabilities of every next token: (B, L - 1, V).

    No attention mask is needed: in a causal model, tokens do not attend to the padding on their right.
    """
    ids = pad_sequence([response.ids for response in responses], batch_first=True)
    return model(input_ids=ids).logits[:, :-1].float().log_softmax(-1)


def select_tokens(logprobs: torch.Tensor, responses: list[Response], part: str) -> list[tuple]:
    """Return the log-probabilities (T, V) and the ids (T,) of T tokens of each response.

    part: `all` selects all tokens of a response, `reasoning` those before the label.
    """
    tokens = []
    for row, response in zip(logprobs, responses, strict=True):
        first = response.prompt_length
        end = len(response.ids) if part == "all" else response.label_at
        tokens.append((row[first - 1 : end - 1], response.ids[first:end]))  # position t predicts token t + 1
    return tokens


def sequence_logprobs(logprobs: torch.Tensor, responses: list[Response], part: str) -> torch.Tensor:
    """Return log pi(y | x) of each response, or of its reasoning: (B,)."""
    sums = []
    for rows, ids in select_tokens(logprobs, responses, part):
        sums.append(rows.gather(-1, ids.unsqueeze(-1)).sum())
    return torch.stack(sums)


def dpo_loss(policy: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Return -log sigmoid(beta (r+ - r-)) with r = log pi - log ref. policy, reference: (2 B,), chosen first."""
    reward_chosen, reward_rejected = (policy - reference).chunk(2)
    return -logsigmoid(BETA * (reward_chosen - reward_rejected)).mean()


def catto_term(logprobs: torch.Tensor, responses: list[Response]) -> torch.Tensor:
    """Return the paper's term: the mean over pairs of the mean l(c, z~) over y+ plus the mean l(c, 1 - z~) over y-."""
    losses = []
    pairs = len(responses) // 2
    for number, (rows, ids) in enumerate(select_tokens(logprobs, responses, "all")):
        target = rows.gather(-1, ids.unsqueeze(-1))  # log p_t
        rival = rows.scatter(-1, ids.unsqueeze(-1), -torch.inf).amax(-1, keepdim=True)  # log p_r
        confidence = torch.maximum(target, rival).exp()  # c
        surrogate = torch.sigmoid(target.exp() - rival.exp())  # z~ (Eq. 5)
        is_chosen = number < pairs
        s = surrogate if is_chosen else 1 - surrogate
        losses.append((s * (1 - confidence) + (1 - s) * confidence).mean())  # Eq. 6
    return torch.stack(losses).sum() / pairs  # Eq. 7


def label_score(logprobs: torch.Tensor, responses: list[Response]) -> torch.Tensor:
    """Return the log score of the gold label after the model's own reasoning.

    It is a proper score: its expectation is smallest at the true posterior.
    """
    scores = []
    for row, response in zip(logprobs, responses, strict=True):
        scores.append(-row[response.label_at - 1, response.label_ids[response.gold]])
    return torch.stack(scores).mean()


def compute_loss(model, reference, pairs: list[Response], stream: list[Response], objective: str) -> torch.Tensor:
    """Return the loss of a batch. pairs: y+ of every pair, then y- of every pair. objective: `catto` or `decoupled`."""
    part = "reasoning" if objective == "decoupled" else "all"
    logprobs = next_token_logprobs(model, pairs)
    policy = sequence_logprobs(logprobs, pairs, part)
    with torch.no_grad():
        frozen = sequence_logprobs(next_token_logprobs(reference, pairs), pairs, part)
    preference = dpo_loss(policy, frozen)
    if objective == "catto":
        return preference + CATTO_WEIGHT * catto_term(logprobs, pairs)
    # Decoupled: preferences train only the reasoning and the score trains only the label, so they never compete.
    return preference + SCORE_WEIGHT * label_score(next_token_logprobs(model, stream), stream)


def main(name: str, pairs_file: str, stream_file: str, objective: str = "decoupled", batch_size: int = 4) -> None:
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name)
    reference = AutoModelForCausalLM.from_pretrained(name).eval()
    pairs = [json.loads(line) for line in Path(pairs_file).read_text().splitlines()]
    stream = [json.loads(line) for line in Path(stream_file).read_text().splitlines()]

    def encode(row, side):
        return encode_response(tokenizer, row["prompt"], row[side][-1]["content"], row["labels"], row["gold"])

    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-6)
    for start in range(0, len(pairs), batch_size):
        batch = pairs[start : start + batch_size]
        responses = [encode(row, "chosen") for row in batch] + [encode(row, "rejected") for row in batch]
        # Two responses of the stream for each pair; after its end, the stream starts again.
        scored_rows = [stream[(2 * start + n) % len(stream)] for n in range(2 * len(batch))]
        scored = [encode(row, "completion") for row in scored_rows]
        loss = compute_loss(model, reference, responses, scored, objective)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"pairs {start + len(batch)} of {len(pairs)}: loss {loss.item():.4f}")
    for part in (model, tokenizer):
        part.save_pretrained(f"{name}-{objective}")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        raise SystemExit(__doc__)
    main(*sys.argv[1:])
