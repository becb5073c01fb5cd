"""Coding agents as they come from npm, against `nq serve` with models that write what a task needs: each reads a file,
edits it, runs a command and answers, streaming, with thinking and without, and goes on with the conversation. Claude
Code also looks at a screenshot.

agents.py NQ NPM_FOLDER [NAME...]
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import scripted
from scripted import call

NQ, NPM, NAMES = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve(), sys.argv[3:]
ROOT = Path(tempfile.mkdtemp(prefix="agents-"))
LIMIT = 400
IMAGES = Path(__file__).resolve().parents[2] / "pictures/tests/fixtures"


class Agent:
    """One agent: its program, the calls its tools want, and its settings."""

    xml = False
    sees = False
    thinks = [True, False]

    def __init__(self, url):
        self.url = url
        self.work = ROOT / self.name / "work"
        self.home = ROOT / self.name / "home"

    def file(self):
        return str(self.work / "notes.txt")

    def texts(self):
        """What the model writes: a title, three calls, an answer, another answer."""
        done = ["The file says two: MODE.", "Nothing is left to do: MODE."]
        return ['{"title": "A file"}', *[call(*c, xml=self.xml) for c in self.calls()], *done]

    def environment(self, thinking):
        return {}

    def run(self, thinking):
        for folder in [self.work, self.home]:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        (self.work / "notes.txt").write_text("one\n")
        subprocess.run(["git", "init", "-q", self.work], check=True)
        self.prepare(thinking)
        asked = "Put two in place of one in notes.txt, and show me the file."
        mode = "after a thought" if thinking else "at once"
        for again, prompt, words in [(False, asked, "The file says two"), (True, "What is left?", "Nothing is left to do")]:
            out = self.ask(prompt, thinking, again)
            assert f"{words}: {mode}" in out, f"{self.name}, thinking {thinking}, again {again}:\n{out}"
        for name in ["notes.txt", "seen.txt"]:
            found = (self.work / name).read_text()
            assert found == "two\n", f"{self.name}: {name} holds {found!r}"

    def ask(self, prompt, thinking, again):
        program, *arguments = self.command(prompt, thinking, again)
        settings = {"HOME": str(self.home), "CI": "1", "NO_COLOR": "1", "TERM": "dumb"}
        settings |= {f"XDG_{n}_HOME": str(self.home / n.lower()) for n in ["CONFIG", "DATA", "STATE", "CACHE"]}
        settings |= {k: v for k, v in os.environ.items() if k in ("PATH", "LANG", "TMPDIR")}
        done = subprocess.run(
            [NPM / "node_modules/.bin" / program, *arguments], cwd=self.work, env=settings | self.environment(thinking),
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=LIMIT, text=True,
        )
        return done.stdout

    def command_line(self):
        return f"cat {self.work}/notes.txt > {self.work}/seen.txt; cat {self.work}/seen.txt"


class OpenCode(Agent):
    name = "opencode"

    def calls(self):
        return [
            ("read", {"filePath": self.file()}),
            ("edit", {"filePath": self.file(), "oldString": "one", "newString": "two"}),
            ("bash", {"command": self.command_line(), "description": "Shows the file"}),
        ]

    def prepare(self, thinking):
        options = {} if thinking else {"options": {"reasoningEffort": "none"}}
        model = {"name": self.name, "tool_call": True, "reasoning": True, "limit": {"context": 131072, "output": 4096}}
        provider = {
            "npm": "@ai-sdk/openai-compatible", "name": "nq", "options": {"baseURL": f"{self.url}/v1", "apiKey": "none"},
            "models": {self.name: model | options},
        }
        settings = {
            "$schema": "https://opencode.ai/config.json", "provider": {"nq": provider}, "model": f"nq/{self.name}",
            "small_model": f"nq/{self.name}", "share": "disabled", "autoupdate": False,
            "permission": {"edit": "allow", "bash": "allow"},
        }
        (self.work / "opencode.json").write_text(json.dumps(settings))

    def environment(self, thinking):
        return {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_LSP_DOWNLOAD": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"}

    def command(self, prompt, thinking, again):
        return ["opencode", "run", *(["-c"] if again else []), "-m", f"nq/{self.name}", prompt]


class Pi(Agent):
    name = "pi"

    def calls(self):
        return [
            ("read", {"path": "notes.txt"}),
            ("edit", {"path": "notes.txt", "edits": [{"oldText": "one", "newText": "two"}]}),
            ("bash", {"command": self.command_line()}),
        ]

    def prepare(self, thinking):
        model = {"id": self.name, "reasoning": True, "contextWindow": 131072, "maxTokens": 4096}
        model["compat"] = {"thinkingFormat": "qwen-chat-template"}
        provider = {"baseUrl": f"{self.url}/v1", "api": "openai-completions", "apiKey": "none", "models": [model]}
        folder = self.home / ".pi/agent"
        folder.mkdir(parents=True)
        (folder / "models.json").write_text(json.dumps({"providers": {"nq": provider}}))

    def environment(self, thinking):
        return {"PI_OFFLINE": "1"}

    def command(self, prompt, thinking, again):
        level = "medium" if thinking else "off"
        return ["pi", "-p", *(["-c"] if again else []), "--model", f"nq/{self.name}", "--thinking", level, prompt]


class QwenCode(Agent):
    name = "qwen"
    xml = True

    def calls(self):
        return [
            ("read_file", {"file_path": self.file()}),
            ("edit", {"file_path": self.file(), "old_string": "one", "new_string": "two"}),
            ("run_shell_command", {"command": self.command_line(), "is_background": False}),
        ]

    def prepare(self, thinking):
        body = {"chat_template_kwargs": {"enable_thinking": thinking}}
        settings = {
            "security": {"auth": {"selectedType": "openai"}}, "privacy": {"usageStatisticsEnabled": False},
            "general": {"disableAutoUpdate": True, "enableAutoUpdate": False}, "telemetry": {"enabled": False},
            "model": {"name": self.name, "generationConfig": {"extra_body": body}},
        }
        folder = self.home / ".qwen"
        folder.mkdir()
        (folder / "settings.json").write_text(json.dumps(settings))

    def environment(self, thinking):
        return {"OPENAI_BASE_URL": f"{self.url}/v1", "OPENAI_API_KEY": "none", "OPENAI_MODEL": self.name}

    def command(self, prompt, thinking, again):
        return ["qwen", "--yolo", *(["--continue"] if again else []), "-p", prompt]


class ClaudeCode(Agent):
    name = "claude"

    def calls(self):
        return [
            ("Read", {"file_path": self.file()}),
            ("Edit", {"file_path": self.file(), "old_string": "one", "new_string": "two"}),
            ("Bash", {"command": self.command_line(), "description": "Shows the file"}),
        ]

    def prepare(self, thinking):
        """Its settings are in the environment."""

    def environment(self, thinking):
        return {
            "ANTHROPIC_BASE_URL": self.url, "ANTHROPIC_AUTH_TOKEN": "none", "ANTHROPIC_MODEL": self.name,
            "ANTHROPIC_SMALL_FAST_MODEL": self.name, "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        } | ({} if thinking else {"MAX_THINKING_TOKENS": "0"})

    def command(self, prompt, thinking, again):
        return ["claude", "-p", prompt, *(["-c"] if again else []), "--model", self.name,
                "--permission-mode", "acceptEdits", "--allowedTools", "Read,Edit,Bash"]


class ClaudeCodeSees(ClaudeCode):
    name = "claude-sees"
    sees = True
    thinks = [False]

    def texts(self):
        look = call("Read", {"file_path": str(self.work / "screenshot.png")})
        return ['{"title": "A picture"}', look, "The screenshot is there: MODE."]

    def run(self, thinking):
        self.work.mkdir(parents=True)
        self.home.mkdir()
        shutil.copy(IMAGES / "rgb-300x200.png", self.work / "screenshot.png")
        out = self.ask("What does screenshot.png show?", thinking, False)
        assert "The screenshot is there: at once" in out, out


class Codex(Agent):
    name = "codex"

    def calls(self):
        line = {"cmd": f"cat {self.file()}"}
        edit = {"cmd": f"sed -i s/one/two/ {self.file()}"}
        return [("exec_command", line), ("exec_command", edit), ("exec_command", {"cmd": self.command_line()})]

    def prepare(self, thinking):
        folder = self.home / ".codex"
        folder.mkdir()
        effort = "medium" if thinking else "none"
        (folder / "config.toml").write_text(f"""
model = "{self.name}"
model_provider = "nq"
model_context_window = 131072
model_reasoning_effort = "{effort}"

[model_providers.nq]
name = "nq"
base_url = "{self.url}/v1"
wire_api = "responses"
""")

    def command(self, prompt, thinking, again):
        common = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
        return ["codex", "exec", *common, *(["resume", "--last"] if again else []), prompt]


AGENTS = [OpenCode, Pi, QwenCode, ClaudeCode, ClaudeCodeSees, Codex]


def serve(names):
    """Starts a server with a model for each agent; returns it and its address."""
    out = open(ROOT / "server.json", "w")
    models = [part for n in names[1:] for part in ("--model", f"{n}={ROOT / n / 'model'}")]
    first = names[0]
    command = [NQ, "serve", ROOT / first / "model", "--served-name", first, *models, "--device", "cpu", "--port", "0",
               "--parallel", "4", "--json", "--ctx", str(scripted.CONTEXT)]
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=open(ROOT / "server.log", "w"))
    for _ in range(600):
        try:
            return server, json.loads((ROOT / "server.json").read_text())["url"]
        except json.JSONDecodeError:
            time.sleep(0.1)
            assert server.poll() is None, (ROOT / "server.log").read_text()
    raise AssertionError("the server did not start")


def main():
    chosen = [a for a in AGENTS if not NAMES or a.name in NAMES]
    for agent in chosen:
        made = agent("")
        scripted.build(ROOT / made.name / "model", made.texts(), xml=made.xml, sees=made.sees)
    server, url = serve([a.name for a in chosen])
    try:
        for agent in chosen:
            for thinking in agent.thinks:
                began = time.monotonic()
                agent(url).run(thinking)
                print(f"ok: {agent.name}, thinking {'on' if thinking else 'off'} ({time.monotonic() - began:.0f} s)", flush=True)
    finally:
        server.terminate()
        server.wait()
        shutil.rmtree(ROOT, ignore_errors=True)


main()
