"""Real HTTP servers over a real (tiny) model that speak as vLLM's and SGLang's do, with faults to
order.

Both compute the model's own log-probabilities. vLLM's answer lists the prompt's own token before
the K largest; SGLang's lists the K largest. Both write on, too, most likely token by token, and so
does a server of OpenAI's kind where it has a tokenizer. `faults` is a list consumed one per
request, in order of arrival: "503" (an overload answer), "drop" (the connection is cut), "hang" (no
answer), or a function of the finished answer that spoils it.
"""

import asyncio
import base64
import threading
from collections import Counter

import torch
from aiohttp import web
from tiny_teacher import full_logprobs


class ModelServer:
    """Runs in a thread of its own; `address` is its base address. Use as a context manager."""

    def __init__(
        self, model, *, name="tiny", faults=(), max_logprobs=20, flat=True, tokenizer=None
    ):
        self.tokenizer = tokenizer
        self.model, self.name, self.max_logprobs, self.flat = model, name, max_logprobs, flat
        self.faults = list(faults)
        self.bodies, self.keys = [], []
        self.prompts = Counter()
        self.answered = Counter()
        self.running = self.most_running = 0
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self):
        self._thread.start()
        assert self._started.wait(10)
        return self

    def __exit__(self, *exc_info):
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    def _serve(self):
        async def main():
            self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
            app = web.Application(middlewares=[self._note_key])
            app.add_routes(
                [
                    web.get("/v1/models", self._models),
                    web.get("/version", self._version),
                    web.post("/v1/completions", self._completions),
                    web.get("/model_info", self._model_info),
                    web.get("/server_info", self._server_info),
                    web.post("/generate", self._generate),
                    web.post("/v1/chat/completions", self._chat),
                ]
            )
            runner = web.AppRunner(app, shutdown_timeout=0.1)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.address = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
            self._started.set()
            await self._stop.wait()
            await runner.cleanup()

        asyncio.run(main())

    @web.middleware
    async def _note_key(self, request, handler):
        self.keys.append(request.headers.get("Authorization"))
        return await handler(request)

    async def _answer(self, request, prompt_of, build):
        body = await request.json()
        self.bodies.append(body)
        prompt = prompt_of(body)
        self.prompts[tuple(prompt)] += 1
        fault = self.faults.pop(0) if self.faults else None
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(0.01)
            if fault == "503":
                return web.json_response({"error": "overloaded"}, status=503)
            if fault == "drop":
                request.transport.abort()
                raise ConnectionResetError
            if fault == "hang":
                self.running -= 1  # the client has given up on it long before the handler ends
                try:
                    await asyncio.sleep(3600)
                finally:
                    self.running += 1
            answer = build(body, prompt)
            if isinstance(answer, web.Response):
                return answer
            self.answered[tuple(prompt)] += 1
            if callable(fault):
                answer = fault(answer)
            if isinstance(answer, str):
                return web.Response(text=answer)
            return web.json_response(answer)
        finally:
            self.running -= 1

    # vLLM

    async def _models(self, request):
        return web.json_response(
            {
                "object": "list",
                "data": [{"id": self.name, "root": "/models/tiny", "max_model_len": 256}],
            }
        )

    async def _version(self, request):
        return web.json_response({"version": "0.32.0"})

    async def _completions(self, request):
        def prompt_of(body):
            prompt = body["prompt"]
            return prompt if isinstance(prompt, list) else self.tokenizer(prompt).input_ids

        return await self._answer(request, prompt_of, self._completion)

    def _completion(self, body, prompt):
        if "prompt_logprobs" not in body:
            return self._written_completion(body, prompt)
        count = body["prompt_logprobs"]
        if count > self.max_logprobs:
            words = f"prompt logprobs of {count} is greater than max allowed: {self.max_logprobs}"
            return web.json_response({"error": {"message": words}}, status=400)
        logprobs = full_logprobs(self.model, prompt)
        positions = [None]
        for position, token in enumerate(prompt[1:]):
            row = logprobs[position]
            listed = [token, *row.topk(count).indices.tolist()]
            positions.append(
                {
                    str(v): {
                        "logprob": float(row[v]),
                        "rank": int((row >= row[v]).sum()),
                        "decoded_token": "x",
                    }
                    for v in listed
                }
            )
        choice = {"index": 0, "text": "", "prompt_logprobs": positions, "prompt_token_ids": prompt}
        return {"object": "text_completion", "model": self.name, "choices": [choice]}

    def _written_completion(self, body, prompt):
        ends = body.get("stop_token_ids", [self.tokenizer.eos_token_id])
        tokens, rows = self._write_on(prompt, body["max_tokens"], ends)
        over = tokens[-1] in ends
        spoken = self.tokenizer.decode(tokens[:-1] if over else tokens)
        choice = {
            "index": 0,
            "text": spoken,
            "finish_reason": "stop" if over else "length",
            "stop_reason": tokens[-1] if over else None,
        }
        if body.get("return_token_ids"):
            choice |= {"prompt_token_ids": prompt, "token_ids": tokens}
        if count := body.get("logprobs"):
            listed = [
                {f"token_id:{v}": float(row[v]) for v in [token, *row.topk(count).indices.tolist()]}
                for token, row in zip(tokens, rows, strict=True)
            ]
            choice["logprobs"] = {"top_logprobs": listed}
        return {"object": "text_completion", "model": self.name, "choices": [choice]}

    def _write_on(self, prompt, count, ends):
        """The most likely tokens after a prompt, and the distribution that each was taken from."""
        tokens, rows = [], []
        while len(tokens) < count and (not tokens or tokens[-1] not in ends):
            logprobs = full_logprobs(self.model, [*prompt, *tokens], self.model.config.vocab_size)
            rows.append(logprobs[-1])
            tokens.append(int(logprobs[-1].argmax()))
        return tokens, rows

    # OpenAI

    async def _chat(self, request):
        def prompt_of(body):
            text = self.tokenizer.apply_chat_template(
                body["messages"], add_generation_prompt=True, tokenize=False
            )
            return self.tokenizer(text, add_special_tokens=False).input_ids

        return await self._answer(request, prompt_of, self._chat_completion)

    def _chat_completion(self, body, prompt):
        (choice,) = self._written_completion(body, prompt)["choices"]
        message = {"role": "assistant", "content": choice.pop("text") or None}
        return {"object": "chat.completion", "choices": [{**choice, "message": message}]}

    # SGLang

    async def _model_info(self, request):
        return web.json_response(
            {
                "model_path": "/models/tiny",
                "served_model_name": self.name,
                "weight_version": "default",
            }
        )

    async def _server_info(self, request):
        return web.json_response({"version": "0.5.23", "served_model_name": self.name})

    async def _generate(self, request):
        return await self._answer(request, lambda body: body["input_ids"], self._generation)

    def _generation(self, body, prompt):
        if "top_logprobs_num" not in body:
            settings = body["sampling_params"]
            ends = settings["stop_token_ids"]
            tokens, _ = self._write_on(prompt, settings["max_new_tokens"], ends)
            over = tokens[-1] in ends
            reason = {"type": "stop", "matched": tokens[-1]} if over else {"type": "length"}
            meta = {"prompt_tokens": len(prompt), "finish_reason": reason}
            text = self.tokenizer.decode(tokens)
            return {"text": text, "output_ids": tokens, "meta_info": meta}
        count = body["top_logprobs_num"]
        rows = full_logprobs(self.model, prompt)[:-1]
        top = rows.topk(count)
        meta = {"id": "0", "prompt_tokens": len(prompt), "completion_tokens": 1}
        said = [None, *rows[range(len(prompt) - 1), prompt[1:]].tolist()]
        meta["input_token_logprobs"] = [[v, t, None] for v, t in zip(said, prompt, strict=True)]
        if self.flat and body.get("return_flat_raw_top_logprobs"):
            meta |= flat_fields(top.values, top.indices)
        else:
            meta["input_top_logprobs"] = [None] + [
                [[value, token, None] for value, token in zip(values, tokens, strict=True)]
                for values, tokens in zip(top.values.tolist(), top.indices.tolist(), strict=True)
            ]
        return {"text": "", "meta_info": meta}


def flat_fields(values: torch.Tensor, ids: torch.Tensor) -> dict:
    """SGLang's flat form of [rows, K] prompt candidates behind one empty position."""
    encoded = {"val": values.float().numpy().tobytes(), "idx": ids.int().numpy().tobytes()}
    fields = {
        f"input_top_logprobs_{name}_flat_b64": base64.b64encode(data).decode()
        for name, data in encoded.items()
    }
    return fields | {
        "input_top_logprobs_val_flat_b64_dtype": "float32",
        "input_top_logprobs_idx_flat_b64_dtype": "int32",
        "input_top_logprobs_shape": list(values.shape),
        "input_top_logprobs_null_prefix": 1,
    }
