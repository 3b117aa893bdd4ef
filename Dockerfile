# A server for one index, on the CPU or on a GPU of the host:
#   docker build -t listwise .
#   docker run -p 8000:8000 -e LISTWISE_TOKEN=... -v "$PWD/shop:/index" listwise
FROM python:3.12-slim
WORKDIR /listwise
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
RUN pip install --no-cache-dir --constraint constraints.txt '.[serve,milvus,imagenet]' \
 && useradd --create-home --uid 1000 listwise
USER 1000
EXPOSE 8000
HEALTHCHECK --start-period=60s CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health')"]
ENTRYPOINT ["listwise", "serve", "--host", "0.0.0.0"]
CMD ["/index"]
