# A server for one folder of photos, or for one index, on the CPU or on a GPU of the host:
#   docker build -t listwise .    # for a GPU: --build-arg TORCH=
#   docker run -p 8000:8000 -e LISTWISE_TOKEN=... -v "$PWD/photos:/photos:ro" -v shop:/index listwise
FROM python:3.12-slim
# The build of PyTorch, as uv names it: cpu, or one such as cu128; empty is the one of the package index, with CUDA.
ARG TORCH=cpu
WORKDIR /listwise
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
RUN pip install --no-cache-dir uv==0.13.8 \
 && uv pip install --system --no-cache ${TORCH:+--torch-backend "$TORCH"} --constraint constraints.txt '.[serve,milvus,imagenet]' \
 && useradd --create-home --uid 1000 listwise \
 && install --directory --owner listwise /index
USER 1000
EXPOSE 8000
HEALTHCHECK --start-period=10m CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health')"]
# Photos that are mounted at /photos are added to the index in /index first.
ENTRYPOINT ["sh", "-c", "if [ -d /photos ]; then listwise index build /index /photos; fi; exec listwise serve --host 0.0.0.0 \"${@:-/index}\"", "listwise"]
