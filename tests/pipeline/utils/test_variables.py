"""Variables that hold secrets, and those that are known to be harmless, by their names."""

from __future__ import annotations

import pytest

from pipeline.utils.variables import is_harmless, says_secret

SECRET = [
    "GITHUB_PAT", "PAT", "SLACK_WEBHOOK_URL", "PGPASS", "PGPASSWORD", "DB_PW", "MYSQL_PWD",
    "HTTP_AUTH", "AUTHORIZATION", "HF_TOKEN", "SLURM_JWT", "SENTRY_DSN", "AWS_ACCESS_KEY_ID",
    "SESSION_COOKIE", "WANDB_API_KEY", "PIPE_RDZV_TOKEN", "client_secret",
    "AZURE_STORAGE_SAS_URL", "CUDA_MIRROR_PASSWORD",
]  # fmt: skip
HARMLESS = [
    "PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "HF_HOME", "TMPDIR", "LC_ALL", "LANG", "TERM", "PWD",
    "OLDPWD", "SLURM_JOB_NODELIST", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "NCCL_DEBUG",
    "MASTER_ADDR", "RANK", "TORCH_EXTENSIONS_DIR", "TOKENIZERS_PARALLELISM", "SSH_AUTH_SOCK",
    "XDG_RUNTIME_DIR",
]  # fmt: skip
NEITHER = [
    "FOO",
    "MODEL",
    "HTTP_PROXY",
    "PIP_INDEX_URL",
    "GIT_COMMITTER_NAME",
    "PATHOLOGY",
    "RANKED",
    "XLANG",
]


@pytest.mark.parametrize("name", SECRET)
def test_names_that_say_it(name: str) -> None:
    assert (says_secret(name), is_harmless(name)) == (True, False)


@pytest.mark.parametrize("name", HARMLESS)
def test_names_of_harmless_values(name: str) -> None:
    assert (says_secret(name), is_harmless(name)) == (False, True)


@pytest.mark.parametrize("name", NEITHER)
def test_names_that_say_nothing(name: str) -> None:
    assert (says_secret(name), is_harmless(name)) == (False, False)
