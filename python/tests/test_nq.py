"""The installed package, on the demo model."""

import array
import asyncio
import contextlib
import functools
import inspect
import io
import itertools
import json
import logging
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from pathlib import Path
from unittest import mock

import nq

PROGRAM = Path(sys.executable).with_name("nq")
ROOT = Path(__file__).resolve().parents[2]
TEXT = ROOT / "assets/demo-eval.txt"
# A shell's background jobs are started deaf to interrupts, and so would these tests be.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Tests that are about notes look at them.
logging.getLogger("nq").addHandler(logging.NullHandler())
LONG = {"temperature": 0.0, "max_tokens": 100_000}


def threads():
    return len(os.listdir("/proc/self/task"))


def interrupted_soon(seconds=0.3):
    """Sends this process what Ctrl-C sends, in a while."""
    timer = threading.Timer(seconds, os.kill, [os.getpid(), signal.SIGINT])
    timer.start()
    return timer


def handles(process, number):
    """True if a process has a handler for a signal."""
    status = Path(f"/proc/{process}/status").read_text()
    return int(re.search(r"SigCgt:\s*(\w+)", status)[1], 16) >> (number - 1) & 1


def write_adapter(folder):
    """A LoRA adapter that adds a number to each weight of the demo's first queries."""
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    header = {
        name.format("A"): {"dtype": "F32", "shape": [1, 512], "data_offsets": [0, 2048]},
        name.format("B"): {"dtype": "F32", "shape": [512, 1], "data_offsets": [2048, 4096]},
    }
    header = json.dumps(header).encode()
    values = array.array("f", [0.25] * 512 + [1.0] * 512).tobytes()
    data = len(header).to_bytes(8, "little") + header + values
    Path(folder, "adapter_model.safetensors").write_bytes(data)
    settings = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["q_proj"]}
    Path(folder, "adapter_config.json").write_text(json.dumps(settings))


class Quantizing(unittest.TestCase):
    def test_reports_what_it_made_and_replaces_nothing_unasked(self):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "models" / "demo-int8"
            stages = []
            report = nq.quantize(
                "demo", out, bits=8, method="rtn", device="cpu", eval_tokens=512,
                progress=lambda stage, done, total: stages.append((stage, done, total)),
            )
            self.assertEqual((report["bits"], report["method"]), (8, "rtn"))
            self.assertLess(report["file_bytes"], report["source_bytes"])
            self.assertLess(report["quality"]["kld"]["mean"], 0.01)
            self.assertTrue(all(done <= total for _, done, total in stages), stages)
            self.assertGreater(len({stage for stage, _, _ in stages}), 2)
            with self.assertRaisesRegex(FileExistsError, "demo-int8"):
                nq.quantize("demo", out, bits=8, method="rtn", measure=False)
            nq.quantize("demo", out, bits=8, method="rtn", measure=False, force=True)
            self.assertEqual(nq.Model(out, device="cpu").name, "demo-int8")

    def test_reads_texts_to_calibrate_and_to_measure_on(self):
        with tempfile.TemporaryDirectory() as folder:
            out, text = Path(folder) / "out", Path(folder) / "river.txt"
            text.write_text("A river runs to the sea. " * 2000)
            report = nq.quantize(
                "demo", out, method="gptq", simple=True, device="cpu",
                calib=text, calib_tokens=512, eval_text=text, eval_tokens=512,
            )
            self.assertEqual(report["quality"]["text"], "river.txt")
            config = json.loads((out / "config.json").read_text())
            calibration = config["quantization_config"]["calibration"]
            self.assertEqual((calibration["name"], calibration["tokens"]), ("river.txt", 512))

    def test_makes_other_formats_of_a_model_with_an_adapter(self):
        with tempfile.TemporaryDirectory() as folder:
            adapter, file = Path(folder) / "adapter", Path(folder) / "demo.gguf"
            adapter.mkdir()
            write_adapter(adapter)
            how = {"method": "rtn", "clip": True, "format": "gguf", "measure": False, "device": "cpu"}
            report = nq.quantize("demo", file, zero_points=False, head_bits=8, adapters={adapter: 1.0}, **how)
            self.assertEqual((report["format"], report["method"]), ("gguf", "rtn-clip"))
            self.assertEqual(os.listdir(folder).count("demo.gguf.nq"), 0)
            plain = Path(folder) / "plain.gguf"
            nq.quantize("demo", plain, zero_points=False, head_bits=8, **how)
            adapted, unchanged = (nq.Model(path, device="cpu", kv=8) for path in [file, plain])
            self.assertNotEqual(*(bytes(model.logits([1, 2, 3])) for model in [adapted, unchanged]))
            self.assertTrue(adapted.chat("Hello!", temperature=0.0, max_tokens=4).tokens)

    def test_refuses_what_does_not_fit(self):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "out"
            for wrong, text in [
                ({"bits": 7}, "7"),
                ({"method": "magic"}, "gptq"),
                ({"device": "tpu"}, "cuda:N"),
                ({"budget": 1}, "auto"),
                ({"method": "auto", "budget": -1}, "minutes"),
                ({"method": "auto", "budget": 1, "tune_steps": 1}, "both"),
                ({"method": "auto", "tune_steps": 0}, "more than 0"),
                ({"group_size": 48}, "32, 64, 128 or channel"),
                ({"format": "onnx"}, "nq, gguf, compressed-tensors, gptq, awq"),
                ({"format": "gptq", "head_bits": 8}, "loaders of GPTQ"),
                ({"trellis": "octagon", "format": "gguf"}, "nq, which alone has trellis codes"),
                ({"target_bpw": 5.0, "simple": True}, "one for all layers"),
            ]:
                with self.assertRaisesRegex(ValueError, text):
                    nq.quantize("demo", out, **wrong)
            with self.assertRaises(TypeError):
                nq.quantize("demo", out, bits="four")
            with self.assertRaisesRegex(nq.Error, 'no model "demmo".*did you mean demo'):
                nq.quantize("demmo", out)
            self.assertFalse(out.exists())

    def test_ends_with_an_interrupt_and_with_an_error_of_the_callback(self):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "out"
            timer = interrupted_soon()
            with self.assertRaises(KeyboardInterrupt):
                nq.quantize("demo", out, method="auto", device="cpu")
            timer.join()

            def refuse(*_):
                raise ZeroDivisionError

            with self.assertRaises(ZeroDivisionError):
                nq.quantize("demo", out, method="rtn", force=True, progress=refuse)
            self.assertFalse(out.exists())


class Talking(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.model = nq.Model("demo", device="cpu", bits=4)

    def test_names_and_repr(self):
        self.assertEqual(self.model.name, "demo")
        self.assertTrue(self.model.device.startswith("cpu"))
        self.assertIn("demo", repr(self.model))

    def test_an_answer_is_the_same_in_pieces(self):
        settings = {"seed": 3, "max_tokens": 24}
        chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Tell me about a river."}]
        answer = self.model.chat(chat, **settings)
        self.assertTrue(answer)
        pieces = list(self.model.chat(chat, stream=True, **settings))
        self.assertGreater(len(pieces), 1)
        self.assertEqual("".join(pieces), answer)
        self.assertNotEqual(self.model.chat(chat, seed=4, max_tokens=24), answer)
        word = answer.split()[2]
        self.assertEqual(self.model.chat(chat, stop=[word], **settings), answer[:answer.index(word)])

        chat += [{"role": "assistant", "content": answer}, {"role": "user", "content": "And a lake?"}]
        self.assertTrue(self.model.chat(chat, temperature=0.0, max_tokens=4).tokens)

    def test_adapters_are_beside_the_weights(self):
        chat = [{"role": "user", "content": "Tell me about a river."}]
        answer = functools.partial(nq.Model.chat, messages=chat, temperature=0.0, max_tokens=12)
        with tempfile.TemporaryDirectory() as folder:
            write_adapter(folder)
            adapted, unchanged = self.model.with_adapters([folder]), self.model.with_adapters({folder: 0})
        self.assertEqual((adapted.name, adapted.device), (self.model.name, self.model.device))
        self.assertEqual(answer(unchanged), answer(self.model))
        self.assertNotEqual(answer(adapted), answer(self.model))
        with self.assertRaises(FileNotFoundError):
            self.model.with_adapters(["no such folder"])

    def test_answers_at_the_same_time(self):
        chat = "Tell me about a river."
        alone = self.model.chat(chat, temperature=0.0, max_tokens=16)
        first = self.model.chat(chat, stream=True, temperature=0.0, max_tokens=16)
        second = self.model.chat(chat, stream=True, temperature=0.0, max_tokens=16)
        pairs = list(zip(first, second))
        self.assertEqual("".join(a for a, _ in pairs), "".join(b for _, b in pairs))
        found = []
        others = [threading.Thread(target=lambda: found.append(self.model.chat(chat, temperature=0.0, max_tokens=16)))
                  for _ in range(3)]
        for other in others:
            other.start()
        for other in others:
            other.join()
        self.assertEqual(found, [alone] * 3)

    def test_no_thread_outlives_its_stream(self):
        self.model.chat("Hello!", max_tokens=1)
        before = threads()
        for _ in range(3):
            for piece in self.model.chat("Tell me about a river.", stream=True, **LONG):
                break
            with self.model.chat("Tell me about a river.", stream=True, **LONG) as stream:
                next(stream)
            self.assertEqual(list(stream), [])
        self.assertEqual(threads(), before)

    def test_an_interrupt_ends_an_answer(self):
        for stream in [False, True]:
            timer = interrupted_soon()
            with self.assertRaises(KeyboardInterrupt):
                for i in itertools.count():
                    # Long to read and different from its beginning on: most of the time is the native part's.
                    for _ in self.model.chat(f"{i} " + "river " * 900, stream=stream, max_tokens=64):
                        pass
            timer.join()
            self.assertTrue(self.model.chat("Hello!", temperature=0.0, max_tokens=4).tokens)

    def test_wrong_arguments(self):
        for wrong in [{"temperature": -1.0}, {"top_p": 2.0}]:
            for stream in [False, True]:
                with self.assertRaises(ValueError):
                    self.model.chat("Hello!", stream=stream, **wrong)
        for wrong in [{"temperature": "hot"}, {"max_tokens": 1.5}, {"warmth": 1}, {"schema": {}, "shape": 1}]:
            with self.assertRaises(TypeError):
                self.model.chat("Hello!", **wrong)
        with self.assertRaisesRegex(ValueError, "messages"):
            self.model.chat([{"content": "Hello!"}])
        for stream in [False, True]:
            with self.assertRaisesRegex(nq.Error, "context"):
                list(self.model.chat("river " * 1500, stream=stream))

    def test_images_are_files_bytes_or_those_of_pil(self):
        file = Path(__file__).parents[2] / "pictures/tests/fixtures/gray.png"

        class Picture:
            def save(self, fp, format=None):
                fp.write(file.read_bytes())

        for image in (file, str(file), file.read_bytes(), Picture()):
            with self.assertRaisesRegex(nq.Error, "demo.* reads text alone here"):
                self.model.chat("What is it?", images=[image])
            with self.assertRaisesRegex(nq.Error, "reads text alone here"):
                self.model.chat([{"role": "user", "content": "What is it?", "images": [image]}])
        with self.assertRaises(FileNotFoundError):
            self.model.chat("What is it?", images=["there/is/none.png"])

    def test_a_model_that_generates_text_does_not_embed(self):
        with self.assertRaisesRegex(nq.Error, "demo: not an embedding model"):
            self.model.embed(["a river"])
        with self.assertRaisesRegex(TypeError, "list of texts"):
            self.model.embed("a river")

    def test_a_report_is_a_dict(self):
        text = TEXT.read_text(encoding="utf-8")[:8000]
        report = self.model.eval(text, reference="demo", ctx=128, windows=4)
        self.assertEqual((report["windows"], report["ctx"], report["protocol"]), (4, 128, "hf"))
        self.assertGreater(report["kld"]["mean"], 0)
        self.assertGreater(report["ppl"], 1)
        of_file = nq.eval(self.model, TEXT, ctx=128, windows=4)
        self.assertEqual(of_file["ppl"], report["ppl"])
        self.assertNotIn("kld", of_file)
        self.assertEqual(of_file["text"], TEXT.name)
        with self.assertRaisesRegex(ValueError, "one window"):
            self.model.eval("too short")
        with self.assertRaisesRegex(ValueError, "hf or llama"):
            self.model.eval(text, protocol="gguf")
        timer = interrupted_soon()
        with self.assertRaises(KeyboardInterrupt):
            while True:
                self.model.eval(TEXT, reference="demo", ctx=128)
        timer.join()

    def test_a_fork_of_the_process_is_told_to_load_its_own(self):
        if child := os.fork():
            self.assertEqual(os.waitpid(child, 0)[1], 0)
        else:
            try:
                self.model.chat("Hello!")
            except nq.Error as e:
                os._exit("another process" not in str(e))
            os._exit(1)


RIVER = [{"role": "user", "content": "Tell me about a river."}]
LOOK_UP = {"type": "function", "function": {
    "name": "look_up", "description": "Looks up a river.",
    "parameters": {"type": "object", "properties": {"river": {"enum": ["Rhine", "Nile"]}}, "required": ["river"]},
}}


class Answering(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.model = nq.Model("demo", device="cpu", bits=4, draft="ngram")

    def test_an_answer_tells_how_it_was_made(self):
        film = [{"role": "user", "content": "Tell me about the film The Silent River (1931)."}]
        settings = {"temperature": 0.0, "max_tokens": 12, "thinking": False}
        answer = self.model.chat(film, **settings)
        self.assertEqual((answer, answer.text, answer.thinking), (answer.text, str(answer), ""))
        self.assertEqual((answer.stop_reason, answer.stop_text, len(answer.tokens)), ("max_tokens", None, 12))
        self.assertEqual(self.model.decode(answer.tokens), answer)
        self.assertEqual(answer.message, {"role": "assistant", "content": answer})
        _, prompt = self.model.apply_template(film, thinking=False)
        self.assertEqual(answer.usage["prompt_tokens"], len(prompt))
        self.assertEqual(answer.usage["completion_tokens"], 12)
        again = self.model.chat(film, **settings)
        self.assertEqual(again.usage["cached_tokens"], len(prompt) - 1)
        word = answer.split()[2]
        cut = self.model.chat(film, stop=word, **settings)
        self.assertEqual((cut.stop_reason, cut.stop_text), ("stop_text", word))
        self.assertIn("white-space", answer._repr_html_())

    def test_pieces_go_to_a_function_and_to_asyncio(self):
        settings = {"temperature": 0.0, "max_tokens": 12}
        pieces = []
        answer = self.model.chat(RIVER, on_piece=pieces.append, **settings)
        self.assertEqual("".join(pieces), answer)
        self.assertGreater(len(pieces), 1)

        def refuse(_):
            raise ZeroDivisionError

        with self.assertRaises(ZeroDivisionError):
            self.model.chat(RIVER, on_piece=refuse, **LONG)

        async def both():
            stream = self.model.chat(RIVER, stream=True, **settings)
            with self.assertRaisesRegex(ValueError, "not ended"):
                stream.answer
            found = [piece async for piece in stream]
            return found, stream.answer, await self.model.chat_async(RIVER, **settings)

        found, streamed, awaited = asyncio.run(both())
        self.assertEqual(("".join(found), streamed, awaited), (answer, answer, answer))

        async def given_up():
            begun = asyncio.Event()
            talking = asyncio.create_task(self.model.chat_async(RIVER, on_piece=lambda _: begun.set(), **LONG))
            await begun.wait()
            talking.cancel()
            with self.assertRaises(asyncio.CancelledError):
                await talking

        asyncio.run(given_up())
        self.assertEqual(self.model.chat(RIVER, **settings), answer)

    def test_answers_are_held_to_schemas_patterns_and_tools(self):
        schema = {"type": "object", "properties": {"name": {"enum": ["Rhine", "Nile"]}}, "required": ["name"],
                  "additionalProperties": False}
        answer = self.model.chat(RIVER, schema=schema)
        self.assertIn(json.loads(answer)["name"], ["Rhine", "Nile"])
        self.assertRegex(self.model.chat(RIVER, regex="[a-c]{3}"), "^[a-c]{3}$")
        self.assertIn(self.model.complete("A river: ", grammar='start: "Rhine" | "Nile"'), ["Rhine", "Nile"])
        with self.assertRaisesRegex(ValueError, "found several"):
            self.model.chat(RIVER, schema=schema, regex="a")
        with self.assertRaisesRegex(ValueError, "format"):
            self.model.chat(RIVER, regex="(")
        answer = self.model.chat(RIVER, tools=[LOOK_UP], tool_choice="look_up")
        [call] = answer.calls
        self.assertEqual((call.name, str(answer)), ("look_up", ""))
        self.assertIn(json.loads(call.arguments)["river"], ["Rhine", "Nile"])
        self.assertIn("look_up(", answer._repr_html_())
        result = {"role": "tool", "name": "look_up", "content": "1,230 km"}
        last = self.model.chat([*RIVER, answer.message, result], tools=[LOOK_UP], tool_choice="none", temperature=0.0, max_tokens=4)
        self.assertTrue(last.tokens)
        self.assertEqual(last.calls, [])

    def test_tokens_go_in_and_come_out_with_their_probabilities(self):
        tokens = self.model.encode("The river runs")
        self.assertEqual(self.model.decode(tokens), "The river runs")
        logits = self.model.logits(tokens)
        self.assertEqual((logits.shape, logits.format), ((len(tokens), self.model.vocab), "f"))
        last = logits.tolist()[-1]
        best = max(range(len(last)), key=last.__getitem__)
        answer = self.model.complete(tokens, temperature=0.0, max_tokens=4, logprobs=3)
        self.assertEqual(answer, self.model.complete("The river runs", temperature=0.0, max_tokens=4))
        self.assertEqual([its.token for its in answer.logprobs], answer.tokens)
        first = answer.logprobs[0]
        self.assertEqual((first.token, len(first.top), first.top[0][0]), (best, 3, best))
        total = math.log(sum(math.exp(logit - last[best]) for logit in last))
        self.assertAlmostEqual(first.logprob, -total, places=4)
        for wrong in [[], [self.model.vocab]]:
            with self.assertRaises(ValueError):
                self.model.logits(wrong)
            with self.assertRaises(ValueError):
                self.model.complete(wrong)
        with self.assertRaisesRegex(TypeError, "tools"):
            self.model.complete(tokens, tools=[LOOK_UP])

    def test_a_closed_model_is_used_no_more(self):
        with nq.Model("demo", device="cpu") as model:
            stream = model.chat(RIVER, stream=True, temperature=0.0, max_tokens=4)
            next(stream)
        # What was begun goes on to its end.
        self.assertTrue(list(stream))
        model.close()
        for use in [lambda: model.chat("Hello!"), lambda: model.encode("a"), lambda: model.vocab]:
            with self.assertRaisesRegex(ValueError, "closed"):
                use()
        self.assertIn("demo", model._repr_html_())

    def test_drafts_that_do_not_fit_are_refused(self):
        with self.assertRaisesRegex(nq.Error, "an MTP layer"):
            nq.Model("demo", device="cpu", draft="mtp")
        with self.assertRaisesRegex(ValueError, "eagle3"):
            nq.Model("demo", device="cpu", draft="eagle3:")


class Loading(unittest.TestCase):
    def test_names_that_nothing_goes_by(self):
        with self.assertRaisesRegex(nq.Error, "neither `demo`"):
            nq.Model("no such model")
        with tempfile.TemporaryDirectory() as folder, self.assertRaises((OSError, nq.Error)):
            nq.Model(folder)
        with self.assertRaises(ValueError):
            nq.Model("demo", device="tpu")
        with self.assertRaises(ValueError):
            nq.Model("demo", ctx=1, device="cpu").chat("Hello!")

    def test_notes_go_to_the_log(self):
        with self.assertLogs("nq", logging.WARNING) as log:
            nq.Model("demo", device="cpu", bits=8)
        self.assertIn("quantizing at load", log.output[0])

    def test_a_hostile_template_harms_nobody(self):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "demo"
            nq.quantize("demo", out, bits=8, method="rtn", measure=False, device="cpu")
            (out / "chat_template.jinja").write_text("{% set x = namespace(y='x' * 1000) %}{% for i in range(30) %}"
                                                     "{% set x.y = x.y + x.y %}{% endfor %}{{ x.y | length }}")
            model = nq.Model(out, device="cpu")
            with self.assertRaisesRegex(nq.Error, "chat_template|memory"):
                model.chat("Hello!")


class Program(unittest.TestCase):
    def run_nq(self, *words, code=0):
        done = subprocess.run([PROGRAM, *words], capture_output=True, text=True, stdin=subprocess.DEVNULL)
        self.assertEqual(done.returncode, code, done.stderr)
        return done

    def test_runs(self):
        self.assertTrue(self.run_nq("--version").stdout.startswith(f"nq {nq.__version__}"))
        answer = self.run_nq("chat", "demo", "-p", "Name a river.", "--max-tokens", "8", "--device", "cpu")
        self.assertTrue(answer.stdout.strip())
        self.assertIn("unexpected argument", self.run_nq("chat", "--nonsense", code=2).stderr)
        self.assertIn("nq: no model", self.run_nq("inspect", "no such model", code=1).stderr)
        as_module = subprocess.run([sys.executable, "-m", "nq", "--version"], capture_output=True, text=True)
        self.assertEqual(as_module.stdout, self.run_nq("--version").stdout)

    def test_a_reader_that_leaves_is_no_error(self):
        done = subprocess.run(["bash", "-o", "pipefail", "-c", f"'{PROGRAM}' --help | head -1"], capture_output=True)
        self.assertEqual((done.returncode, done.stderr), (0, b""))

    def test_ends_with_an_interrupt(self):
        bench = subprocess.Popen([PROGRAM, "bench", "demo", "--device", "cpu", "--repeats", "1000"],
                                 stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        # Python handles SIGINT from its start on, but SIGTERM only the program.
        while not handles(bench.pid, signal.SIGTERM):
            self.assertIsNone(bench.poll())
            time.sleep(0.01)
        bench.send_signal(signal.SIGINT)
        bench.communicate(timeout=60)
        self.assertEqual(bench.returncode, 130)


class Pages(unittest.TestCase):
    def test_their_examples_run(self):
        quick = functools.partial(nq.quantize, method="rtn", measure=False, device="cpu", force=True)
        before = os.getcwd()
        for page in ["README.md", "docs/library.md"]:
            examples = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S)
            self.assertTrue(examples, page)
            for example in examples:
                # Of README only the time that it takes is changed.
                shown = mock.patch.object(nq, "quantize", quick) if page == "README.md" else contextlib.nullcontext()
                with tempfile.TemporaryDirectory() as folder, shown, contextlib.redirect_stdout(io.StringIO()) as said:
                    os.chdir(folder)
                    try:
                        exec(compile(example, page, "exec"), {})
                    finally:
                        os.chdir(before)
                    self.assertEqual(bool(said.getvalue()), "print" in example)


class Types(unittest.TestCase):
    def test_everything_public_is_documented_and_typed(self):
        for name in nq.__all__:
            found = getattr(nq, name)
            if callable(found):
                self.assertTrue(inspect.getdoc(found), name)
        for found in [nq.quantize, nq.eval, nq.main, nq.Model.chat, nq.Model.chat_async, nq.Model.complete, nq.Model.embed,
                      nq.Model.rerank, nq.Model.eval, nq.Model.logits, nq.Model.apply_template]:
            signature = inspect.signature(found)
            parameters = [p for p in signature.parameters.values() if p.name != "self"]
            self.assertTrue(all(p.annotation is not p.empty for p in parameters), found)
            self.assertIsNot(signature.return_annotation, signature.empty, found)


if __name__ == "__main__":
    unittest.main()
