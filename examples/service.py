"""Serves the ranker in FP8 over HTTP. It takes new weights while it runs, and refuses those that are stale.

    loka generate ranker.yaml
    python service.py --publish ranker.pt --step 100
    python service.py

The second command hands over the weights of a training, before the service starts or while it runs; a trainer calls
`publish`. Ask it: curl localhost:8000/score -d '{"dense": [[0.1, ...]], "ids": [[3, ...]]}'.
It runs on a GPU where there is one, otherwise on the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ranker
from generated import clicks as fp8

SIZES = (32, 128, 512, 2048)  # batches are padded to one of these: each is compiled, and a CUDA graph, once
WEIGHTS = Path("served.pt")


def publish(weights: Mapping[str, Tensor], step: int, path: Path = WEIGHTS) -> None:
    """Hand over the state_dict of a training step, in one go: the service never sees half of a file."""
    written = path.with_name(f"{path.name}.new")
    torch.save({"step": step, "model": dict(weights)}, written)
    os.replace(written, path)


class Scorer:
    """The model with frozen FP8 weights, and the training step that they are of.

    Call it in one thread: CUDA graphs of torch.compile belong to the thread that captured them.
    """

    def __init__(self, path: Path = WEIGHTS) -> None:
        self.path, self.step, self.refused = path, -1, ""
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = ranker.build().to(self.device).eval()
        self.patch = fp8.apply(self.model, mode="infer")  # raises if the package is of another model
        self.compiled = torch.compile(self.model, mode="reduce-overhead")
        self.seen = 0
        self.take_new_weights()
        if self.step < 0:
            raise SystemExit(f"{path}: {self.refused or 'there are no weights yet: a trainer has to publish some'}")

    def take_new_weights(self) -> None:
        """Load what was published since the last call, unless it is stale or of another model: then `refused` says why.

        The weights are copied into those that the compiled model has, and LoKA quantizes them anew in the next call.
        """
        changed = self.path.stat().st_mtime_ns if self.path.exists() else 0
        if changed == self.seen:
            return
        self.seen = changed
        try:
            saved = torch.load(self.path, map_location=self.device, weights_only=True)
            step, weights = int(saved["step"]), dict(saved["model"])
            shapes = {name: x.shape for name, x in weights.items()}
        except Exception as error:  # noqa: BLE001  (whatever was put there, what is served goes on)
            self.refused = f"{self.path} is nothing that `publish` wrote: {error}"
            return
        if shapes != {
            name: x.shape for name, x in self.model.state_dict().items()
        }:  # load_state_dict would copy what fits before it raises
            self.refused = f"step {step}: the weights are of another model"
        elif step <= self.step:
            self.refused = f"step {step} is stale: step {self.step} is served"
        elif not all(torch.isfinite(x).all() for x in weights.values()):
            self.refused = f"step {step}: a weight is not finite"
        else:
            self.model.load_state_dict(weights)
            self.step, self.refused = step, ""

    def score(self, dense: Tensor, ids: Tensor) -> tuple[list[float], int]:
        """Probabilities of a click for rows of dense features and ids, and the step of the weights."""
        rows, scores = len(dense), []
        with torch.no_grad(), torch.autocast(self.device.type, torch.bfloat16):
            self.take_new_weights()
            for start in range(0, rows, SIZES[-1]):
                parts = [each[start : start + SIZES[-1]].to(self.device) for each in (dense, ids)]
                count = len(parts[0])
                size = next(each for each in SIZES if each >= count)
                logits = self.compiled(*(nn.functional.pad(part, (0, 0, 0, size - count)) for part in parts))
                scores += logits[:count, 0].float().sigmoid().tolist()
        return scores, self.step


def service(scorer: Scorer, port: int) -> HTTPServer:
    """A server of one thread, not yet started: POST /score scores, GET /health says what is served, what refused."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            try:
                rows = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                dense, ids = torch.tensor(rows["dense"], dtype=torch.float32), torch.tensor(rows["ids"])
                if dense.shape[1:] != (ranker.DENSE,) or ids.shape != (len(dense), ranker.TABLES):
                    raise ValueError(f"dense has to be (rows, {ranker.DENSE}), ids (rows, {ranker.TABLES})")
                if ids.dtype != torch.int64:
                    raise ValueError("ids have to be whole numbers")
                if not 0 <= int(ids.min()) <= int(ids.max()) < ranker.ROWS:
                    raise ValueError(f"ids have to be from 0 to {ranker.ROWS - 1}")
            except (KeyError, TypeError, ValueError) as error:
                return self.answer(400, {"error": str(error)})
            scores, step = scorer.score(dense, ids)
            self.answer(200, {"scores": scores, "step": step})

        def do_GET(self) -> None:
            self.answer(200, {"step": scorer.step, "refused": scorer.refused})

        def answer(self, status: int, body: dict[str, Any]) -> None:
            text = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: Any) -> None:
            """Nothing: one line a request is the proxy's."""

    return HTTPServer(("localhost", port), Handler)


def main(steps: int, port: int) -> None:
    scorer = Scorer()
    dense, ids = ranker.example_inputs(SIZES[0])
    for _ in range(steps):
        scorer.score(dense, ids)  # compiles, and captures the graph of the smallest size
    scorer.patch.verify(backward=False)  # raises unless every planned FP8 GEMM ran
    print(f"serving the weights of step {scorer.step} on localhost:{port}", flush=True)
    service(scorer, port).serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3, help="calls before the first request")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--publish", type=Path, help="a checkpoint to hand over, instead of serving; needs --step")
    parser.add_argument("--step", type=int, help="the training step of that checkpoint")
    arguments = parser.parse_args()
    if arguments.publish is None:
        main(arguments.steps, arguments.port)
    elif arguments.step is None:
        parser.error("--publish needs --step: older weights are refused by it")
    else:
        publish(torch.load(arguments.publish, map_location="cpu", weights_only=True), arguments.step)
