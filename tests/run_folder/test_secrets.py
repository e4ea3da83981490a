# SPDX-License-Identifier: Apache-2.0
"""What is a credential by its name or form becomes stars, ordinary texts stay, and no text takes long."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import example, given, settings, strategies as st
from profiles import share
from tables import rows

from accel.run_folder import hide_in_config, hide_in_text, hide_in_words
from accel.run_folder._secret_names import is_secret_name
from accel.run_folder._secrets import MOST_TEXT, hide_in_diff

S = "Zq7Vx9Lw3Kj"
LONG = S * 3

SECRET_NAMES = (
    *("apikey", "authtoken", "hf_token_read", "api_key_1", "bearer", "jwt", "private_key_pem", "api_key", "hf-token"),
    *("hfToken", "dbPassword", "password", "passwd", "pwd", "client_secret", "AWS_SECRET_ACCESS_KEY", "access_key_id"),
    *("wandb.api_key", "key", "token", "auth", "db_pass", "cookie", "signature", "X-Amz-Signature", "openaiKey"),
    *(
        "GITHUB_TOKEN",
        "credentials",
        "hfauthtoken",
        "secretkey",
        "passphrase",
        "refresh_token",
        "AccountKey",
        "bot_token",
    ),
)
ORDINARY_NAMES = (
    *("sort_key", "design", "passed", "author", "tokenizer_path", "tokenizer", "max_tokens", "pad_token", "key_dim"),
    *("pad_token_id", "eos_token", "num_keys", "text_key", "monkey", "keyword", "compass", "bypass", "forward_pass"),
    *("signal", "assign", "significance", "authentic", "secretary", "past_key_values", "key_padding_mask", "keys"),
    *(
        "token_type_ids",
        "tokens",
        "passes",
        "token_path",
        "api_key_file",
        "auth_method",
        "cookiecutter",
        "per_token",
        "public_key",
    ),
)
SECRET_WORDS = (
    *("--pwd=§", "--cookie=§", "--apikey §", "--authtoken §", "--accesskey §", "--api_key_2 §", "--private-key-pem §"),
    *("--bearer §", "--token §", "-e TOKEN=§", "+wandb.api_key=§", "--password=a;§,b"),
)
SECRET_TEXTS = (
    "password: §",
    '{"api_key": "§"}',
    "{'password': '§ §', 'user': 'x'}",
    '{\\"api_key\\": \\"§\\"}',
    '{"password": {"value": "§"}}',
    '{"secret": {\n  "value": "§"\n}}',
    '--header "Authorization: Bearer §"',
    "Authorization: Basic §",
    "Authorization: AWS4-HMAC-SHA256 Credential=§, Signature=§",
    "Set-Cookie: id=§; user=§",
    "X-Api-Key: §",
    "the api key: § is wrong",
    "access_token: §",
    "bearer: §",
    "Bearer §",
    "password = '§ §'",
    "password = §",
    'password="""§"""',
    "password='§ and no end §",
    'os.environ["HF_TOKEN"] = "§"',
    "client_secret=§)",
    "https://me:§@host/x",
    "https://host/x?key=§&y=1",
    "Command 'curl --api-key §1 -x' returned non-zero exit status 22",
    "Command '['curl', '--token', '§1']' returned non-zero exit status 22",
    "hf_§",
    "sk-proj-§",
    "AIzaSy§",
    "eyJhbGciOiJI.§.§",
    "-----BEGIN RSA PRIVATE KEY-----\n§\n§\n-----END RSA PRIVATE KEY-----",
    "-----BEGIN PRIVATE KEY-----\n§\n§",
    "§\n§\n-----END PRIVATE KEY-----",
)
ORDINARY_TEXTS = (
    "KeyError: 'a.weight'",
    "sorted(rows, key=len)",
    "sort_key=len",
    "tokens: 4096",
    "tokens: many, key: value cache",
    'Missing key(s) in state_dict: "a.weight", "b.bias".',
    'Unexpected key(s) in state_dict: "module.a.weight".',
    "design=modern passed=12 author=ada tokenizer_path=/data/tok",
    "max_tokens=512, pad_token=\"<pad>\", eos_token=</s>, unk_token='[UNK]'",
    "from huggingface_hub import hf_hub_download",
    "past_key_values=None, key_padding_mask=mask",
    "f(use_auth_token=True, token=None)",
    "Unexpected token: < in JSON at position 0",
    "RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x8 and 16x2)",
    "monkey=banana keyword=x turkey=bird",
    "pass 2 of 3: ok",
    "forward_pass=fast backward_pass=slow",
    "signal=SIGTERM assign=x significance=high",
    "node0:29400",
    "http://localhost:8080/a?x=1&y=2",
    "def f(api_key: str = None, password: Optional[str] = None):",
    "NoCredentialsError: Unable to locate credentials",
    "token_type_ids: tensor([0, 1])",
    'if token == "abc": pass',
    "token = tokenizer.encode(text)",
    "model(key=k, value=v, query=q)",
    "FileNotFoundError: [Errno 2] No such file or directory: '/data/keys.json'",
    "PermissionError: [Errno 13] Permission denied: '/root/secret.txt'",
    "ImportError: cannot import name 'secrets' from 'x'",
    "AuthorizationError: not permitted",
    "SecretNotFound: x",
    "password=${PASSWORD} token={token}",
    "password=***",
    "access: denied; private: true; api: v2",
    "torch.Size([2, 3]) dtype=torch.float32",
    '  File "/home/ada/train.py", line 9, in step',
    "password=123456 token=-1.5e3",
    "author: Ada; authority: none",
    "2026-11-23 23:30:22 INFO step: 3 loss: 0.5",
    "sk-learn-style-estimators",
    "std::secret::of",
    "------- a table -------",
    "the key: a name",
    "the flags --token and --password are required, --api-key TOKEN is not",
    "['--token', '--lr', '3e-4'] --max-tokens 4096k --token-path /data/v2",
    "export WANDB_API_KEY=<your key> token=<token>",
)
# Of programs, shells and files of settings, a value each.
LEAKS = (
    "auth=('user', '§')",
    "auth = ('user', '§')",
    "requests.get(url, auth=('user', '§'), timeout=3)",
    "auth=(user, '§')",
    "auth = HTTPBasicAuth('user', '§')",
    "auth=HTTPBasicAuth('user', '§')",
    "password := '§'",
    "if (token := '§'):",
    "TOKEN: str = '§'",
    "TOKEN: str='§'",
    "token: Optional[str] = '§'",
    "api_key: str | None = '§'",
    "TOKEN: Final[str] = '§'",
    "token: 'str' = '§'",
    "password: SecretStr = SecretStr('§')",
    "token: str = Field(default='§')",
    "TOKEN = SecretStr('§')",
    "wandb.login(key='§')",
    "wandb.login(relogin=True, key='§')",
    "wandb.login('§')",
    "login('user', '§')",
    "wandb.login(\n    key='§',\n)",
    "os.environ.setdefault('HF_TOKEN', '§')",
    'setdefault("HF_TOKEN", "§")',
    "os.environ.get('HF_TOKEN', '§')",
    "os.getenv('HF_TOKEN', '§')",
    "monkeypatch.setenv('WANDB_API_KEY', '§')",
    "os.putenv('HF_TOKEN','§')",
    "config.set('db', 'password', '§')",
    "os.environ.update(HF_TOKEN='§')",
    "os.environ.update({'HF_TOKEN': '§'})",
    "setattr(args, 'api_key', '§')",
    "os.environ |= {'HF_TOKEN': '§'}",
    "[('password', '§')]",
    "dict([('api_key', '§')])",
    "parser.add_argument('--api-key', default='§')",
    "parser.add_argument('--api-key', type=str, default='§', help='x')",
    "parser.add_argument('-k', '--api-key', default='§')",
    "parser.add_argument(\n    '--token',\n    default='§',\n)",
    "@click.option('--password', default='§')",
    "flags.DEFINE_string('api_key', '§', 'help')",
    "token: str = typer.Option('§')",
    "password = (\n    '§'\n)",
    "api_key = (\n    '§'\n)",
    "api_key = \\\n    '§'",
    "token=\n    '§'",
    "{'password':\n    '§'}",
    '"hf_token":\n  "§"',
    "password:\n  §",
    "password: |\n  §\n  §",
    "password: >-\n  §",
    "api_key: |\n  §",
    "<password>§</password>",
    "<db:password type='x'>§</db:password>",
    "<apiKey>\n  §\n</apiKey>",
    '<add key="password" value="§"/>',
    "- name: HF_TOKEN\n  value: §",
    '- name: HF_TOKEN\n  value: "§"',
    '{"name": "HF_TOKEN", "value": "§"}',
    "curl -u user:§ https://x",
    "curl --user user:§ https://x",
    "curl -s --user 'user:§' https://x",
    "curl -uuser:§ https://x",
    "sshpass -p § ssh x",
    "sshpass -p§ ssh x",
    "sshpass -p '§' ssh x",
    "mysql -u root -p§ db",
    "docker login -u me -p § reg",
    "redis-cli -a § ping",
    "wget --password=§ x",
    "tool --password §",
    "curl -H 'Authorization: Bearer §' x",
    'curl -H "X-Api-Key: §" x',
    '--header "Authorization: Bearer §"',
    "https://user:§@host/x",
    "export HF_TOKEN=§",
    "export HF_TOKEN='§'",
    "ENV HF_TOKEN=§",
    "ENV HF_TOKEN §",
    "set HF_TOKEN=§",
    "api_key = §",
    "password = §",
    "password=§",
    "hf_token: §",
    "hf_token: '§'",
    "HF_TOKEN: §",
    "  WANDB_API_KEY: §",
    "machine api.wandb.ai\n  login user\n  password §",
    "token=f('a', '§')",
    "password = get('a', '§')",
    "os.environ['HF_TOKEN'] = '§'",
    "os.environ['HF_TOKEN'] = (\n    '§'\n)",
    "headers = {'Authorization': 'Bearer §'}",
    "headers['Authorization'] = f'Bearer §'",
    "AKIA = 1; aws_secret_access_key = '§'",
    "password = 'a' '§'",
    "password = 'x' + '§'",
    "api_key = 'x' + '§'",
    "api_key = os.getenv('KEY') or '§'",
    "keyring.set_password('svc', 'user', '§')",
    "connect(user='u', passwd='§')",
    "psycopg2.connect('dbname=x password=§')",
    "token = b'§'",
    "token = r'§'",
    "token = '''§'''",
    'password = """\n§\n"""',
    "password=$'§'",
    "self.api_key = api_key or '§'",
    "def f(api_key='§'):",
    "def f(api_key: str = '§'):",
    "lambda token='§': token",
    "Client(api_key='§')",
    "openai.api_key = '§'",
    "token, user = '§', 'me'",
    "user, token = 'me', '§'",
)
HARMLESS = (
    "sorted(rows, key=lambda row: row[1])",
    "rows.sort(key='name')",
    "df.sort_values(key='a')",
    "max_tokens = 5",
    "max_tokens: int = 512",
    "token = tokenizer.encode(text)",
    "token: str",
    "tokens: list[int] = []",
    "def f(token: str, key: str = 'name') -> None:",
    "pad_token = '<pad>'",
    "tokenizer = AutoTokenizer.from_pretrained('gpt2')",
    "parser.add_argument('--max-tokens', default='5')",
    "parser.add_argument('--key', default='name')",
    "parser.add_argument('--token-path', default='/data/x')",
    "config.setdefault('tokenizer', 'gpt2')",
    "os.environ.setdefault('TOKENIZERS_PARALLELISM', 'false')",
    "x.get('max_tokens', '5')",
    "if key == 'token':",
    "{'key': 'value'}",
    "{'token': 'the', 'score': 1}",
    "fields = ['password', 'username', 'email']",
    "fields = ('username', 'password')",
    "getattr(tok, 'pad_token', '')",
    "class Password:\n    '''Doc.'''",
    'class Token:\n    """Doc."""',
    "def check(password):\n    '''Check it.'''\n    return 1",
    "docker run -u 1000:1000 image",
    "docker run --user app:app image",
    "ssh -p 2222 host",
    "mkdir -p out/x",
    "grep -u a:b",
    "<token>",
    "<value>5</value>",
    "<p>text</p>",
    "<title>Tokens</title>",
    "- name: EPOCHS\n  value: '5'",
    "{'name': 'lr', 'value': 'x1y2z3w4'}",
    "loss = criterion(pred, target)",
    "num_heads: 8\nkey: value",
    "key: |\n  some text\n  more",
    "secret_path: /data/x",
    "api_key = None",
    "api_key: str | None = None",
    "token = next_token",
    "token = tokens[0]",
    "token = model.generate(x)[0]",
    "password = ''",
    "assert token == 'abc'",
    "key = 'model.layers.0.weight'",
    "for key, value in state.items():",
    "key, value = 'a', 'b'",
    "import secrets",
    "token, rest = text.split()",
    "logger.info('token %s', token)",
    "x = d['token']",
    "tokens_per_s = 5",
    "login()",
    "client.login(url)",
    "self.token = token",
    "dict(key='a', value='b')",
    "nn.MultiheadAttention(key=k, value=v)",
    "attention(query, key=keys, value=values)",
    "next(iter(tokens))",
    "eos_token='</s>', bos_token='<s>'",
    "author = ('Ada', 'Bob')",
    "auth = None",
    "auth=(None, None)",
    "the value: 5",
    "default='x'",
    "parser.add_argument('--lr', default='1e-3')",
    "os.environ.get('RANK', '0')",
    "setattr(model, 'weight', 'x')",
    "ENV PATH /usr/bin:/bin",
    "password required",
    "key_padding_mask = (mask == 'x')",
    "token_ids = ('a', 'b')",
)
BAD = (
    *(
        "A",
        "key",
        "key-",
        "=",
        "token=",
        "a=",
        ":",
        "://",
        "eyJ",
        "eyJ-",
        "eyJaaaaaaaa.",
        "-----BEGIN PRIVATE KEY-----",
    ),
    *("-----BEGIN X-----\n", "-----END X-----", "-----", "-", "password='", 'password:"', "password: {", "{[", "hf_"),
    *("password={", "password: ", "password:\n", " ", "\n", "sk-", "sk-a", "\\", "'", '"', 'a\\"', "b'", "api key "),
    *(
        "value=",
        "default='",
        "('token', ",
        "set('token', '",
        "curl -u a:",
        "<token>",
        "login('",
        "mysql ",
        "docker login ",
    ),
    *(
        "password = 'a' ",
        "a, ",
        "token = x or ",
        'password="""',
        "password: |\n ",
        "ENV ",
        "login ",
        "token=f(",
        "token: a[",
    ),
    *(
        "add_argument('",
        "name: token ",
        "api_key = (",
        "password:\n 'a'\n",
        "key='",
        "(",
        "f(key='a', ",
        "x, token = 'a', ",
    ),
    *("x.", "Authorization: ", "Cookie: '", "AbCd", "aA", "bearer ", "xoxb-", "QQQQQQQQQQQQQQQQ\n", "token", "a@://"),
)


def test_names_count_by_whole_words() -> None:
    assert [name for name in SECRET_NAMES if not is_secret_name(name)] == []
    assert [name for name in ORDINARY_NAMES if is_secret_name(name)] == []


@pytest.mark.parametrize("words", SECRET_WORDS)
def test_flags_of_one_word_and_two_hide_their_values(words: str) -> None:
    assert S not in " ".join(hide_in_words(words.replace("§", S).split()))


@rows("text", SECRET_TEXTS)
def test_texts_hide_credentials(text: str) -> None:
    filled = text.replace("§", LONG if "-----" in text else S)
    shown = hide_in_text(f"before {filled} after")
    assert S not in shown
    assert shown.startswith("before ")


@rows("text", ORDINARY_TEXTS)
def test_ordinary_texts_stay_as_they_are(text: str) -> None:
    assert hide_in_text(text) == text
    assert hide_in_config({"note": text}) == ({"note": text}, ())


def test_mappings_hide_at_any_depth_and_keep_numbers() -> None:
    nested: dict[str, Any] = {
        **{name: {"value": S, "size": 5, "rows": [S, {"x": S}]} for name in SECRET_NAMES},
        "deep": [{"a": {"hf_token_read": S}}],
        "command": ["train.py", "--apikey", S],
        "password": "123456",
        "url": f"https://me:{S}@host",
    }
    shown, hidden = hide_in_config(nested)
    assert S not in str(shown)
    assert shown["token"] == {"value": "***", "size": 5, "rows": ["***", {"x": "***"}]}
    assert {"token.value", "token.rows[1].x", "deep[0].a.hf_token_read", "command[2]", "password", "url"} <= set(hidden)
    ordinary = dict.fromkeys(ORDINARY_NAMES, "text") | {
        "api_key": 5,
        "auth": True,
        "token": None,
        "keys": ["image"],
    }
    assert hide_in_config(ordinary) == (ordinary, ())


@settings(max_examples=share(1.2), deadline=None)
@given(st.integers(-70, 70), st.booleans())
@example(0, True)
@example(0, False)
def test_no_half_of_a_credential_stays_where_a_text_is_cut(shift: int, newest: bool) -> None:
    leak = f"https://me:{S}@host password: {S} Authorization: Bearer {S} hf_{S}"
    filling = "y" * (MOST_TEXT - len(leak) + shift)
    text = f"{leak} {filling} tail" if newest else f"{filling} {leak} tail"
    shown = hide_in_text(text, newest=newest)
    assert len(shown) < MOST_TEXT + 100
    assert not any(S[at : at + 4] in shown for at in range(len(S) - 3))


def test_a_long_word_keeps_its_beginning_and_says_how_much_is_missing() -> None:
    shown = hide_in_text("A" * 50_000)
    assert shown == "A" * MOST_TEXT + f"[{50_000 - MOST_TEXT} characters more]"
    assert hide_in_text("A" * MOST_TEXT) == "A" * MOST_TEXT
    assert hide_in_text("b\n" * 50_000, newest=True).endswith("b\nb\n")
    assert len(str(hide_in_config({"a": "A" * 50_000}))) < MOST_TEXT + 100


@rows("piece", BAD)
def test_no_text_of_the_bounded_length_takes_long(piece: str) -> None:
    text = (piece * (MOST_TEXT // len(piece) + 1))[:MOST_TEXT]
    began_s = time.thread_time()
    _ = hide_in_text(text)
    assert time.thread_time() - began_s < 5.0  # at most 0.13 as measured; 10 and more where a pattern goes back


BODY = "MIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSjAgEAAoIBAQC7VJTUt9Us8cKj"
PEM = [f"-----BEGIN {'PRIVATE'} KEY-----", *[BODY] * 4, f"-----END {'PRIVATE'} KEY-----"]


@pytest.mark.parametrize("sign", ["+", "-", " "])
@pytest.mark.parametrize(("first", "last"), [(0, 6), (0, 3), (3, 6), (2, 4)])
def test_differences_of_files_keep_their_lines_and_lose_credentials(sign: str, first: int, last: int) -> None:
    lines = ["diff --git a/x b/x", "--- a/x", "+++ b/x", "@@ -1 +1 @@", " for step in range(9):", "-lr = 1", "+lr = 2"]
    secrets = [*PEM[first:last], f'api_key = "{S}"', f"url = 'https://me:{S}@host'", "max_tokens = 512"]
    shown = hide_in_diff("".join(f"{line}\n" for line in [*lines, *(f"{sign}{line}" for line in secrets)]))
    assert shown.split("\n")[: len(lines)] == lines
    assert shown.endswith(f"_key = \"***\"\n{sign}url = 'https://***@host'\n{sign}max_tokens = 512\n")
    assert BODY[:20] not in shown
    assert S not in shown


@pytest.mark.parametrize("sign", ["+", "-", " "])
@pytest.mark.parametrize("value", [S, "correct-Horse9battery", "3fa9c07d1be24a6f9d21"])
def test_no_line_of_a_program_keeps_the_half_of_a_credential(sign: str, value: str) -> None:
    for text in LEAKS:
        lines = ["x = 1", *text.replace("§", value).split("\n"), "y = 2"]
        shown = hide_in_diff("@@ -1 +1 @@\n" + "".join(f"{sign}{line}\n" for line in lines))
        assert value not in shown, text
        assert "***" in shown, text
        assert shown.startswith(f"@@ -1 +1 @@\n{sign}x = 1\n"), text
        assert shown.endswith(f"\n{sign}y = 2\n"), text


@pytest.mark.parametrize("sign", ["+", "-", " "])
def test_innocent_lines_of_a_program_stay(sign: str) -> None:
    for text in HARMLESS:
        diff = "".join(f"{sign}{line}\n" for line in ["x = 1", *text.split("\n"), "y = 2"])
        assert hide_in_diff(f"@@ -1 +1 @@\n{diff}") == f"@@ -1 +1 @@\n{diff}", text


def test_the_old_and_the_new_value_below_an_unchanged_name_are_hidden() -> None:
    for name in ("password = (", "api_key = \\", "token="):
        diff = f" {name}\n-    '{S}1'\n+    '{S}2'\n x = 1\n"
        shown = hide_in_diff(diff)
        assert S not in shown
        assert shown.endswith("x = 1\n") or name.endswith("(")


def test_differences_are_not_cut_where_texts_are() -> None:
    diff = "".join(f"+line = {at}\n" for at in range(5000))
    assert len(diff) > MOST_TEXT
    assert hide_in_diff(diff) == diff
