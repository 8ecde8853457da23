"""Names of environment variables: those that say that their value is secret, and those whose values
are known to be harmless."""

from __future__ import annotations

import re

_SECRET = re.compile(
    "TOKEN|SECRET|(?<!BY)(?<!COM)PASS|CREDENTIAL|AUTH(?!OR(?!I))|COOKIE|WEBHOOK|CONNECTION_?STRING|JWT|BEARER|"
    "PRIVATE|SIGNATURE|(?:API|ACCESS|ACCOUNT)_?KEY|_KEY$|KEY_ID$|"
    "(?:^|_)(?:PAT|PW|PIN|DSN|SAS)(?:_|$)|.PWD$",
    re.IGNORECASE,
)
_NO_SECRET_ALL_THE_SAME = frozenset(
    {"OLDPWD", "SSH_AUTH_SOCK", "XAUTHORITY", "TOKENIZERS_PARALLELISM"}
)
"""Names that only look like it."""

_HARMLESS = (
    # the shell, the terminal, the user
    "_ HOME PWD OLDPWD USER LOGNAME USERNAME HOSTNAME HOST SHELL SHLVL TERM TERM_* COLORTERM "
    "COLUMNS LINES LS_COLORS NO_COLOR FORCE_COLOR CLICOLOR* PS1 PS2 EDITOR VISUAL PAGER LESS* "
    "DISPLAY WAYLAND_DISPLAY XDG_* SSH_AUTH_SOCK SSH_TTY SSH_CONNECTION SSH_CLIENT XAUTHORITY "
    "TMUX* STY OSTYPE HOSTTYPE MACHTYPE INVOCATION_ID JOURNAL_STREAM container DEBIAN_FRONTEND CI "
    # places
    "*PATH *DIR *_HOME *_ROOT *_PREFIX *_CACHE "
    # language and time
    "LANG LANGUAGE LC_* TZ "
    # Python, and what compiles
    "PYTHON* VIRTUAL_ENV* CONDA_* UV_CACHE_DIR CC CXX CPP LD_* CFLAGS CXXFLAGS CPPFLAGS LDFLAGS "
    "MAKEFLAGS MAX_JOBS NINJA_STATUS PYTEST_* HYPOTHESIS_* "
    # computing and communication
    "CUDA_* CUDNN_* CUBLAS_* NVIDIA_* NV_* NVTE_* NCCL_* RCCL_* ROCM_* ROCR_* HIP_* HSA_* "
    "MIOPEN_* GLOO_* UCX_* FI_* MKL_* OMP_* KMP_* GOMP_* OPENBLAS_* NUMEXPR_* VECLIB_* MALLOC_* "
    "TORCH* PYTORCH_* TRITON_* DS_* DEEPSPEED_* ACCELERATE_* FSDP_* TOKENIZERS_PARALLELISM "
    "TF_CPP_* TF_ENABLE_* TF_FORCE_* XLA_* RAYON_* "
    # launchers and schedulers
    "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE NODE_RANK GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK "
    "ROLE_WORLD_SIZE ROLE_NAME MASTER_ADDR MASTER_PORT PET_* PIPE_* PIPETRAIN_* SLURM_* SLURMD_* "
    "SRUN_* SBATCH_* OMPI_* OPAL_* PMI_* PMIX_* PMI2_* PRTE_* MPI_* MPIR_* MV2_* I_MPI_* HYDRA_* "
    "HYDI_* PBS_* LSB_* LSF_* SGE_* KUBERNETES_* SKYPILOT_* DSTACK_* "
    # names of hubs and trackers
    "HF_HUB_OFFLINE HF_HUB_ENABLE_* HF_HUB_DISABLE_* HF_HUB_VERBOSITY HF_DATASETS_OFFLINE "
    "HF_ENDPOINT TRANSFORMERS_OFFLINE TRANSFORMERS_VERBOSITY WANDB_PROJECT WANDB_ENTITY "
    "WANDB_NAME WANDB_MODE WANDB_RUN_ID WANDB_RUN_GROUP WANDB_SILENT MLFLOW_EXPERIMENT_NAME "
    "MLFLOW_RUN_NAME AWS_REGION AWS_DEFAULT_REGION AWS_PROFILE "
)
"""Names and patterns of names. What is neither here nor says that it is secret may be."""
_IS_HARMLESS = re.compile(
    "|".join(re.escape(name).replace(r"\*", ".*") for name in _HARMLESS.split())
)


def says_secret(name: str) -> bool:
    """Whether a variable's name says that its value is secret."""
    return _SECRET.search(name) is not None and name not in _NO_SECRET_ALL_THE_SAME


def is_harmless(name: str) -> bool:
    """Whether the value of a variable with this name can be shown to everybody."""
    return _IS_HARMLESS.fullmatch(name) is not None and not says_secret(name)
